"""What a run of pytest says at its end: the time of each part beside its budget.

CPU time of a test is that of its worker, of the processes that have ended below it, and of those
that it still has. What runs below Slurm's daemons is not among them.
"""

import contextlib
import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# CPU seconds of each folder of tests in `make test`, on a core of 2 to 3 GHz.
BUDGETS = {"cluster": 170, "payload": 240, "report": 42, "security": 48, "unit": 102}
_BEFORE = pytest.StashKey[float]()


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

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        words = report.nodeid.split("/")
        part = words[1] if words[0] == "tests" and len(words) > 2 else words[0]
        self.wall[part] += report.duration
        self.cpu[part] += dict(report.user_properties).get(f"cpu_s {report.when}", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time of each part")
        for part, cpu in sorted(self.cpu.items(), key=lambda pair: -pair[1]):
            budget = BUDGETS.get(part)
            over = f"  over its budget of {budget} s" if budget and cpu > budget else ""
            line = f"{part:12} {self.wall[part]:7.1f} s {cpu:7.1f} s of a processor{over}"
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Tell the process that reports the CPU time since the last report of this worker."""
    now = cpu_s()
    item.user_properties.append((f"cpu_s {call.when}", now - item.config.stash.get(_BEFORE, now)))
    item.config.stash[_BEFORE] = now
    return (yield)
