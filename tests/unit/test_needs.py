"""Tests that need a package: skipped with the command, or failed in CI; installed by make alone."""

from pathlib import Path

import pytest

from minicluster import machine
from support import needs


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH on which there is nothing but an apt-get that notes its words and finds nothing."""
    apt = tmp_path / "apt-get"
    apt.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls; echo E: no such package; exit 100\n')
    apt.chmod(0o755)
    monkeypatch.setattr(machine, "search_path", lambda: str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.delenv("CI", raising=False)
    return tmp_path


def test_a_test_without_its_package_says_how_and_fails_in_ci(bare, monkeypatch) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"sudo apt-get install .* slurmdbd chromium"):
        needs.require("chromium", "slurmdbd")
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=r"CI is set, and munge, shellcheck absent"):
        needs.require("shellcheck", "munge")
    assert not (bare / "calls").exists()


def test_make_installs_all_at_once_where_it_may(bare, monkeypatch) -> None:
    assert needs.main() == 0 and not (bare / "calls").exists()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    needs.main()
    update, install = (bare / "calls").read_text().splitlines()
    assert update.endswith(" update") and {"munge", "chromium", "shellcheck"} <= {*install.split()}
    (bare / "google-chrome").symlink_to("/bin/true")
    needs.require("chromium")  # what is there needs nothing
