"""One launcher a study: a lock that the kernel lets go of, however its holder ends."""

import contextlib
import fcntl
from collections.abc import Iterator

from jobkit.errors import UsageError
from jobkit.paths import StudyPaths, read_json


@contextlib.contextmanager
def held(study: StudyPaths) -> Iterator[None]:
    """Hold the study's lock; raises UsageError while another launcher holds it."""
    with study.launcher_lock.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy(study) from None
        yield


def busy(study: StudyPaths) -> UsageError:
    """What to say where a study is being launched already."""
    record, name = read_json(study.launcher) or {}, study.folder.name
    who = f"process {record['pid']} on {record.get('host')}" if "pid" in record else "another one"
    return UsageError(
        f"{name} is being run by {who}: wait for it, or end it: python -m jobkit cancel {name}"
    )


def check_free(study: StudyPaths) -> None:
    """Raise UsageError while a launcher holds the study's lock; makes nothing."""
    if study.launcher_lock.exists():
        with held(study):
            pass
