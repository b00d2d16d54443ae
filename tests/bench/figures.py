"""The figures of the benchmarks that are kept, and what was lost since: for bench.py."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A figure that a benchmark prints: its name, the pattern of its number, what is better."""

    bench: str
    name: str
    pattern: str
    better: str = "less"


_NUMBER = r"([+-]?[\d,.]+)"
FIGURES = (
    Figure("throughput", "fp32 ours / plain", rf"^fp32 ours / plain, best +{_NUMBER}", "more"),
    Figure("throughput", "fp32 ours / no data", rf"^fp32 ours / no data work +{_NUMBER}", "more"),
    Figure("throughput", "bf16 ours / plain", rf"^bf16 ours / plain, best +{_NUMBER}", "more"),
    Figure("throughput", "bf16 ours / no data", rf"^bf16 ours / no data work +{_NUMBER}", "more"),
    Figure("throughput", "ddp 2 ranks / 1", rf"^ddp 2 ranks / 1 rank +{_NUMBER}", "more"),
    Figure("throughput", "fsdp 2 ranks / 1", rf"^fsdp 2 ranks / 1 rank +{_NUMBER}", "more"),
    Figure("throughput", "ddp ours / plain", rf"^ddp 2 ranks ours / plain +{_NUMBER}", "more"),
    Figure("throughput", "--help, s", rf"^run_benchmarks.py --help +{_NUMBER} s"),
    *(
        Figure("peers", f"{name}: {what}", rf"^{name} .*\n(?:  .*\n)*?  {what}: {_NUMBER}", better)
        for name in ("fp32, 1 rank", "fp32, 2 ranks", "bf16, 1 rank", "bf16, 2 ranks")
        for what, better in (("rate", "more"), ("start", "less"))
    ),
    Figure("strategies", "ddp of single", rf"^ddp +\d+ +{_NUMBER}", "more"),
    Figure("strategies", "fsdp of single", rf"^fsdp +\d+ +{_NUMBER}", "more"),
    Figure("checkpoints", "each epoch / without", rf"^checkpoint each epoch .* without +{_NUMBER}"),
    Figure("checkpoints", "agreeing / alone", rf"^agreeing / alone +{_NUMBER}"),
    Figure("meter", "meter, us a step", rf"^meter: {_NUMBER} us"),
    Figure("meter", "windows, us a step", rf"^payload's windows: {_NUMBER} us"),
    Figure("auto", "hook, CPU ms a step", rf"^hook: {_NUMBER} ms"),
    Figure("analysis", "read: times grep", rf"^  read: times grep +{_NUMBER}"),
    Figure("analysis", "report, s", rf"^  report, \d+ runs: s +{_NUMBER}"),
    *(
        Figure("studies", f"{step}, s of a processor", rf"^{step} +[\d.]+ s +{_NUMBER} s of")
        for step in ("plan", "submit", "status", "collect", "again")
    ),
    Figure("claims", "false alarms, %", rf"^\| all made up \|(?:[^|]*\|){{6}} {_NUMBER}%"),
    Figure("claims", "missed, %", rf"^\| all made up \|(?:[^|]*\|){{7}} {_NUMBER}%"),
)
BENCHES = tuple(dict.fromkeys(figure.bench for figure in FIGURES))


def found_in(bench: str, text: str) -> dict[str, float]:
    """The figures in what a benchmark printed, by name; the first of each."""
    found = {}
    for figure in FIGURES:
        if figure.bench == bench and (match := re.search(figure.pattern, text, re.MULTILINE)):
            found[f"{bench}: {figure.name}"] = float(match[1].replace(",", ""))
    return found


def changes(
    now: dict[str, float], kept: dict[str, float], tolerance: float
) -> Iterator[tuple[str, float, float | None, bool]]:
    """Name, figure, the kept one (None: there is none) and whether more than tolerance is lost.

    tolerance: a share of the kept figure, 0.1 for 10 %.
    """
    better = {f"{figure.bench}: {figure.name}": figure.better for figure in FIGURES}
    for name, value in now.items():
        last = kept.get(name)
        if last is None:
            yield name, value, None, False
        elif better[name] == "more":
            yield name, value, last, value < last * (1 - tolerance)
        else:
            yield name, value, last, value > last * (1 + tolerance)


def key_of(machine: dict[str, Any]) -> str:
    """What must be the same for figures to be compared: processor and number of cores."""
    return f"{machine['processor']}, {machine['cores']} cores"
