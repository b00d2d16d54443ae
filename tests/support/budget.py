"""What a run of pytest says at its end: the time of each part, and how often torch was started."""

import os
import site
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

# Seconds of each folder of tests in `make test`, on two idle cores of 2 to 3 GHz.
BUDGETS = {"cluster": 260, "payload": 300, "report": 40, "security": 40, "unit": 130}
SITE = Path(site.getsitepackages()[0])
# Runs in every Python of the environment as it starts. Only an import is counted: not a search for
# a module's file, and not the import by a process that was forked after it.
HOOK = """
import os, sys
class Finder:
    seen = False
    def find_spec(self, name, path=None, target=None):
        caller = sys._getframe(2).f_code.co_name
        if name == "torch" and not self.seen and caller == "_find_and_load_unlocked":
            self.seen = True
            try:
                with open({log!r}, "a") as file:
                    file.write(" ".join(sys.orig_argv).replace("\\n", " ")[:300] + "\\n")
            except OSError:
                pass
sys.meta_path.insert(0, Finder())
"""


class Report:
    """Collects in the process that reports: the one without workers, or the one that has them."""

    def __init__(self, max_starts: int | None) -> None:
        self.max_starts = max_starts
        self.wall: dict[str, float] = defaultdict(float)
        handle, name = tempfile.mkstemp(prefix="torch-starts-")
        os.close(handle)
        self.log, self.module = Path(name), f"_torch_starts_{os.getpid()}"
        self.log.chmod(0o666)  # tests start processes of other users
        for old in SITE.glob("_torch_starts_*"):  # of a run that was killed
            if not Path("/proc", old.stem.split("_")[3]).exists():
                old.unlink(missing_ok=True)
        (SITE / f"{self.module}.py").write_text(HOOK.format(log=name))
        (SITE / f"{self.module}.pth").write_text(f"import {self.module}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folders = report.nodeid.split("/")[1:-1]  # below tests/
        self.wall[folders[0] if folders else "tests"] += report.duration

    def too_many(self) -> list[str]:
        """The commands that started torch, where these are more than allowed."""
        starts = self.log.read_text().splitlines()
        return starts if self.max_starts is not None and len(starts) > self.max_starts else []

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.too_many() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time of each part")
        say = terminalreporter.write_line
        for part, wall in sorted(self.wall.items(), key=lambda pair: -pair[1]):
            over = wall > BUDGETS.get(part, wall)
            say(f"{part:12} {wall:7.1f} s" + f"  over its budget of {BUDGETS.get(part)} s" * over)
        starts = self.log.read_text().count("\n")
        say(f"starts of Python that imported torch: {starts}")
        if many := self.too_many():
            say("\n  ".join([f"FAILED: more than {self.max_starts}:", *many]))

    def pytest_unconfigure(self) -> None:
        compiled = SITE.glob(f"__pycache__/{self.module}.*")
        for path in (self.log, *SITE.glob(f"{self.module}.p*"), *compiled):
            path.unlink(missing_ok=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "fail where torch starts more often"
    parser.addoption("--max-torch-starts", type=int, metavar="N", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config.getoption("max_torch_starts")))
