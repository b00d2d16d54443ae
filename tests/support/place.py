"""Where the tests find the project, and what many of them do."""

import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def until(condition: Callable[[], object], what: str = "it", timeout: float = 900) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: did not happen within {timeout:g} s"
        time.sleep(0.05)


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path
