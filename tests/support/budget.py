"""What a run of pytest says at its end: the time of each part, and how often torch was started.

CPU time of a test is that of its worker, of the processes that have ended below it, and of those
that it still has. What runs below Slurm's daemons is not among them.
"""

import contextlib
import os
import resource
import site
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# CPU seconds of each folder of tests in `make test`, on a core of 2 to 3 GHz.
BUDGETS = {"cluster": 170, "payload": 240, "report": 42, "security": 48, "unit": 102}
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


_BEFORE = pytest.StashKey[float]()
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


def cpu_s() -> float:
    """CPU seconds of this process, its ended descendants and its children that are there."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    used = sum(u.ru_utime + u.ru_stime for u in both)
    ticks = 0
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            with contextlib.suppress(OSError):
                words = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, words[11:15]))
    return used + ticks / os.sysconf("SC_CLK_TCK")


class Report:
    """Collects in the process that reports: the one without workers, or the one that has them."""

    def __init__(self, max_starts: int | None) -> None:
        self.max_starts = max_starts
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.starts: TorchStarts | None = TorchStarts()
        try:
            self.starts.install()
        except OSError:  # an environment that we may not write
            self.starts.remove()
            self.starts = None
        self.torch: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        part = part_of(report.nodeid)
        self.wall[part] += report.duration
        self.cpu[part] += dict(report.user_properties).get(f"cpu_s {report.when}", 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.starts:
            self.torch = self.starts.of(SITE / "torch")
        too_many = self.max_starts is not None and len(self.torch) > self.max_starts
        unknown = self.max_starts is not None and not self.starts and os.environ.get("CI")
        if (too_many or unknown) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time of each part")
        terminalreporter.write_line("\n".join(self.lines()))

    def lines(self) -> Iterator[str]:
        for part, cpu in sorted(self.cpu.items(), key=lambda pair: -pair[1]):
            budget = BUDGETS.get(part)
            over = f"  over its budget of {budget} s" if budget and cpu > budget else ""
            yield f"{part:12} {self.wall[part]:7.1f} s {cpu:7.1f} s of a processor{over}"
        if not self.starts:
            yield "starts of Python that imported torch: unknown, as the environment is read-only"
            return
        yield f"starts of Python that imported torch: {len(self.torch)}"
        if self.max_starts is not None and len(self.torch) > self.max_starts:
            yield f"FAILED: more than {self.max_starts} starts of Python that imported torch:"
            yield from (f"  {words}" for words in self.torch)

    def pytest_unconfigure(self) -> None:
        if self.starts:
            self.starts.remove()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "fail where torch starts more often"
    parser.addoption("--max-torch-starts", type=int, metavar="N", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config.getoption("max_torch_starts")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Tell the process that reports the CPU time since the last report of this worker."""
    now = cpu_s()
    item.user_properties.append((f"cpu_s {call.when}", now - item.config.stash.get(_BEFORE, now)))
    item.config.stash[_BEFORE] = now
    return (yield)
