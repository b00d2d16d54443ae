"""What the tests of hostile input share: a folder of logs for each test."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
