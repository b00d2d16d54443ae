"""The installing of packages, with an apt-get that is a script: nothing is installed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import socket

import pytest

from minicluster import locks, machine, packages
from minicluster.errors import ClusterError, UsageError


def test_nothing_is_installed_where_it_may_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(UsageError, match=r"sudo apt-get update && sudo apt-get install .* munge"):
        packages.install(lambda: ["munge"], print)
    monkeypatch.setenv("CI", "true")
    assert packages.may_install()


def stand_in(folder: Path, patch: pytest.MonkeyPatch, apt_get: str) -> Path:
    """An apt-get that is a shell script; what it notes in the file `calls` is in the result."""
    for name, text in (("apt-get", apt_get), ("sudo", 'shift; exec "$@"')):
        (folder / name).write_text(f"#!/bin/sh\ncd {folder}\n{text}\n")
        (folder / name).chmod(0o755)
    patch.setattr(machine, "search_path", lambda: str(folder))
    patch.setattr(locks, "_try_file", functools.partial(_own_lock, folder.name, locks._try_file))
    patch.setenv("CI", "1")
    return folder / "calls"


def _own_lock(folder: str, try_lock: Callable[[str], socket | None], name: str) -> socket | None:
    """A lock of this test's alone: another process may be installing what it really needs."""
    return try_lock(f"{name}-{folder}-{os.getpid()}")


def munge() -> list[str]:
    return machine.missing(["munge"])


NOTES = 'echo "$@" >>calls; '


def test_install_runs_apt_get_and_checks_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an apt-get that installs munged only."""
    calls = stand_in(tmp_path, monkeypatch, NOTES + "cp apt-get munged")
    assert packages.install(munge, print)
    assert capsys.readouterr().out.endswith("installed\n")
    assert calls.read_text().splitlines() == [
        "--quiet update",
        "--quiet install -y --no-install-recommends munge",
    ]
    assert not packages.install(munge, print)
    with pytest.raises(ClusterError, match="still without their commands: slurmdbd"):
        packages.install(lambda: machine.missing(["munge", "slurmdbd"]), print)


def test_of_two_at_once_one_installs_and_both_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = NOTES + 'case "$*" in *munge) sleep 0.5; cp apt-get munged;; esac'
    calls = stand_in(tmp_path, monkeypatch, slow)
    with ThreadPoolExecutor() as both:
        done = [both.submit(packages.install, munge, print) for _ in range(2)]
        assert [one.result() for one in done] == [True, True]
    assert calls.read_text().count("munge") == 1


def test_install_waits_for_somebody_elses_apt_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An apt-get that finds the lists and then the packages locked, each the first time."""
    busy = '[ -e "$2" ] || { touch "$2"; echo "E: Could not get lock /var/lib/x."; exit 100; }; '
    calls = stand_in(tmp_path, monkeypatch, NOTES + busy + "cp apt-get munged")
    monkeypatch.setattr(packages.time, "sleep", lambda seconds: None)
    assert packages.install(munge, print)
    assert [line.split()[1] for line in calls.read_text().splitlines()] == [
        "update", "update", "install", "install"
    ]  # fmt: skip
