"""The figures of the benchmarks that are kept, and what was lost since: for bench.py."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A figure that a benchmark prints: its name, the pattern of its number, what is better.

    better: more, less, or neither. slack: a loss of so much, in the figure's unit, counts as none.
    """

    bench: str
    name: str
    pattern: str
    better: str = "less"
    slack: float = 0.0


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
_FIRST, _NEXT = r"(?:[^|]*\|)", r"[^|]*\|"
FIGURES += (
    Figure("check_ranks", "check of 2 ranks, ms", rf"check {_NUMBER} ms"),
    *(
        Figure("formats", f"{way} / default", rf"^cnn fp32 {way} +\d+ +{_NUMBER}", "neither")
        for way in ("contiguous", "compile")
    ),
    *(
        Figure("truth", f"published, to 2x: {what}, %", rf"^\| published \| to 2x {where}", better)
        for what, where, better in (
            ("held", rf"\|(?: \d+ \|)?{_NEXT} {_NUMBER}%", "more"),
            ("error", rf"\|(?: \d+ \|)?{_NEXT}{_NEXT} {_NUMBER}%", "less"),
        )
    ),
    *(
        Figure("truth", f"3 repeats: {what}, %", rf"^\| 3 \| lognormal \|{skip} {_NUMBER}%", "more")
        for what, skip in (("rate held", _NEXT), ("10 % told apart", _FIRST + "{5}"))
    ),
    *(
        Figure("rehearse", name, rf"^\| {name} \|{_FIRST}{{3}} {_NUMBER} \|")
        for name in ("job, files", "one rank, calls", "collect, calls", "report, calls")
    ),
    Figure("wide", "32 ranks: MiB of a rank", rf"^\| 32 \| {_NUMBER} "),
    Figure("wide", "32 ranks: start, s", rf"^\| 32 \|{_NEXT} {_NUMBER} "),
    *(
        Figure("inference", f"{way}, 64 images, ms", rf"^\| {line} \| 1 \|{_NEXT} {_NUMBER} ")
        for way in ("eager", "ONNX Runtime", "AOTInductor, C++")
        for line in (re.escape(way),)
    ),
    *(
        Figure(
            "step_model", f"{way}: 8 ranks off by, %",
            rf"{way}: fitted to 1, 2, 4 ranks, 8 .*: [+-]?([\d.]+)%", slack=10,
        )
        for way in ("ddp", "fsdp")
    ),
)  # fmt: skip
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
    figures = {f"{figure.bench}: {figure.name}": figure for figure in FIGURES}
    for name, value in now.items():
        last, figure = kept.get(name), figures[name]
        if last is None or figure.better == "neither":
            lost = False
        elif figure.better == "more":
            lost = value < last * (1 - tolerance) - figure.slack
        else:
            lost = value > last * (1 + tolerance) + figure.slack
        yield name, value, last, lost


def key_of(machine: dict[str, Any]) -> str:
    """What must be the same for figures to be compared: processor and number of cores."""
    return f"{machine['processor']}, {machine['cores']} cores"
