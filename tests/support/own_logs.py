"""A folder of logs for each test of a folder whose conftest.py imports this fixture."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
