"""One launcher per study: a file lock, which the kernel releases when its holder ends."""

import contextlib
import os
from collections.abc import Iterator

from jobkit.errors import UsageError
from jobkit.files import locked
from jobkit.paths import StudyPaths, read_json


@contextlib.contextmanager
def held(study: StudyPaths) -> Iterator[None]:
    """Hold the study's lock; raises UsageError while another launcher does."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(study.launcher_lock, wait=False))
        except BlockingIOError:
            raise busy(study) from None
        except OSError as error:
            raise UsageError(f"{study.launcher_lock}: {error.strerror}: remove it") from None
        yield


def busy(study: StudyPaths) -> UsageError:
    """Return the error for a study that another launcher runs."""
    record, name = read_json(study.launcher) or {}, study.folder.name
    who = f"process {record['pid']} on {record.get('host')}" if "pid" in record else "another one"
    return UsageError(
        f"{name} is being run by {who}: wait for it, or cancel it: python -m jobkit cancel {name}"
    )


def check_free(study: StudyPaths) -> None:
    """Raise UsageError while a launcher holds the study's lock; create no file."""
    if os.path.lexists(study.launcher_lock):
        with held(study):
            pass
