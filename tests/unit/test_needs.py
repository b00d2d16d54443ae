"""Tests that need a package: it is installed, or they fail in CI and are skipped elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from minicluster import machine
from support import needs


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A PATH on which there is nothing but an apt-get that finds no such package."""
    (tmp_path / "apt-get").write_text("#!/bin/sh\necho E: Unable to locate package; exit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    (tmp_path / "sudo").symlink_to("/usr/bin/env")
    monkeypatch.setattr(machine, "search_path", lambda: str(tmp_path))
    needs._lack.cache_clear()
    yield tmp_path
    needs._lack.cache_clear()


def test_what_cannot_be_had_fails_in_ci(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(pytest.fail.Exception, match=r"CI is set, and shellcheck, munge cannot"):
        needs.packages("shellcheck", "munge")
    with pytest.raises(pytest.fail.Exception, match="Unable to locate package"):
        needs.packages("shellcheck", "munge")


def test_where_it_may_not_be_installed_the_skip_says_how(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match=r"sudo apt-get install .* slurmdbd chromium"):
        needs.packages("chromium", "slurmdbd")


def test_what_is_there_needs_nothing(bare: Path) -> None:
    (bare / "google-chrome").write_text("")
    (bare / "google-chrome").chmod(0o755)
    needs.packages("chromium")
    assert needs.program("chromium") == str(bare / "google-chrome")
