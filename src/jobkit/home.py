"""Folders of the user: the home folder, where there is one, and caches."""

import os
import tempfile
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.permissions import own_folder


def cache_root() -> Path:
    """The user's folder for caches: $XDG_CACHE_HOME, else ~/.cache.

    Raises UsageError where there is no home: without HOME, and a user id that has no name.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise UsageError(
            f"HOME is not set, and user id {os.geteuid()} has no home: set JOBKIT_DATA_DIR, HOME "
            "or XDG_CACHE_HOME"
        ) from None


def expanded(path: str | Path) -> Path:
    """The absolute path, with a ~ at its beginning as the home folder; UsageError without one."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"{path}: {error}: write the path without ~") from None


def keep_compiler_cache() -> None:
    """Give torch's compiler a cache folder that is this user's own, unless one is named.

    Its default is /tmp/torchinductor_USER, which anybody can make first, and it unpickles what lies
    there. Raises UsageError where somebody took the name of ours.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = own_folder(Path(tempfile.gettempdir()) / f"jobkit-{os.geteuid()}")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torchinductor")
