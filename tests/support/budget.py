"""What a run of pytest says at its end: the time of each part, and how often torch was started."""

import os
import site
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# Seconds of each folder of tests in `make test`, on two idle cores of 2 to 3 GHz.
BUDGETS = {"cluster": 260, "payload": 300, "report": 40, "security": 40, "unit": 130}
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
            from importlib.machinery import PathFinder
            spec = PathFinder.find_spec(name, path)
            try:
                file = os.open({log!r}, os.O_WRONLY | os.O_APPEND)
            except OSError:
                return None
            words = " ".join(sys.orig_argv).replace("\\n", " ")[:300]
            os.write(file, ("%s\\t%s\\n" % (spec and spec.origin, words)).encode())
            os.close(file)
sys.meta_path.insert(0, Finder())
"""

SITE = Path(site.getsitepackages()[0])


class TorchStarts:
    """Counts the Pythons of this environment that import torch."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="torch-starts-")
        os.close(handle)
        self.log = Path(name)
        self.log.chmod(0o666)  # tests start processes of other users
        self.module = f"_torch_starts_{os.getpid()}_{name.rpartition('-')[2]}"

    def install(self) -> None:
        for old in SITE.glob("_torch_starts_*_*"):  # of a run that was killed
            if not Path("/proc", old.name.split("_")[3]).exists():
                old.unlink(missing_ok=True)
        (SITE / f"{self.module}.py").write_text(HOOK.format(log=str(self.log)))
        (SITE / f"{self.module}.pth").write_text(f"import {self.module}\n")

    def remove(self) -> None:
        compiled = (SITE / "__pycache__").glob(f"{self.module}.*")
        for path in (self.log, *SITE.glob(f"{self.module}.*"), *compiled):
            path.unlink(missing_ok=True)

    def of(self, package: Path) -> list[str]:
        """The commands of the Pythons that imported torch from this folder."""
        pairs = (line.partition("\t") for line in self.log.read_text().splitlines())
        return [words for origin, _, words in pairs if origin == str(package / "__init__.py")]


def part_of(nodeid: str) -> str:
    """The folder of a test below tests/."""
    words = nodeid.split("/")
    return words[1] if words[0] == "tests" and len(words) > 2 else words[0]


class Report:
    """Collects in the process that reports: the one without workers, or the one that has them."""

    def __init__(self, max_starts: int | None) -> None:
        self.max_starts = max_starts
        self.wall: dict[str, float] = defaultdict(float)
        self.starts = TorchStarts()
        self.starts.install()
        self.torch: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.wall[part_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.torch = self.starts.of(SITE / "torch")
        too_many = self.max_starts is not None and len(self.torch) > self.max_starts
        if too_many and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time of each part")
        terminalreporter.write_line("\n".join(self.lines()))

    def lines(self) -> Iterator[str]:
        for part, wall in sorted(self.wall.items(), key=lambda pair: -pair[1]):
            budget = BUDGETS.get(part)
            over = f"  over its budget of {budget} s" if budget and wall > budget else ""
            yield f"{part:12} {wall:7.1f} s{over}"
        yield f"starts of Python that imported torch: {len(self.torch)}"
        if self.max_starts is not None and len(self.torch) > self.max_starts:
            yield f"FAILED: more than {self.max_starts} starts of Python that imported torch:"
            yield from (f"  {words}" for words in self.torch)

    def pytest_unconfigure(self) -> None:
        self.starts.remove()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "fail where torch starts more often"
    parser.addoption("--max-torch-starts", type=int, metavar="N", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config.getoption("max_torch_starts")))
