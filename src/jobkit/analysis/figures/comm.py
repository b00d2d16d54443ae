"""`python -m jobkit plot-comm`: the figure of the communication benchmark."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.metric.comm import OPERATIONS, SCOPES, Sample, fit_lines, read_csv
from jobkit.paths import RunPaths, logs_root, read_json
from jobkit.units import say_bytes, say_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPILOG = """examples:
  python -m jobkit plot-comm                    the newest benchmark in logs/comm
  python -m jobkit plot-comm logs/comm/job-42
"""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Draw comm.png, comm.svg and comm.pdf beside comm.csv; return the exit code."""
    parser = Parser(
        prog="jobkit plot-comm",
        description="Plot busbw and latency over the message size, from comm.csv.",
        epilog=EPILOG,
    )
    text = "folder of a benchmark (default: the newest)"
    parser.add_argument("run", nargs="?", type=Path, metavar="DIR", help=text)
    folder = parser.parse_args(argv).run
    if folder is None:
        known = [(p.stat().st_mtime, p.parent) for p in logs_root().glob("comm/*/comm.csv")]
        if not known:
            comm = logs_root() / "comm"
            raise UsageError(f"no comm.csv in {comm}: run python -m jobkit comm first")
        folder = max(known)[1]
    paths = RunPaths(folder)
    samples = read_csv(paths.comm_csv)
    if not samples:
        raise UsageError(f"{paths.comm_csv} has no rows")

    from matplotlib import rc_context

    from jobkit.analysis.figures.style import FORMATS, RC, save

    files = [paths.comm_csv.with_suffix(f".{kind}") for kind in FORMATS]
    with rc_context(RC):
        figure = comm_figure(samples, read_json(paths.comm_json) or {})
        try:
            save(figure, *files)
        except OSError as error:
            raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None
    for path in files:
        print(f"wrote {path}")
    return Exit.OK


def comm_figure(samples: Sequence[Sample], about: Mapping[str, Any]) -> "Figure":
    """busbw and time over the message size, a line for each operation, with the fitted lines.

    about: the content of comm.json, for the line under the title.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    from jobkit.analysis.figures import style
    from jobkit.analysis.tables.text import counted

    where = {"intra_node": ", intra-node", "inter_node": ", inter-node"}
    keys = sorted(
        {(s.operation, s.scope) for s in samples},
        key=lambda key: (SCOPES.index(key[1]), list(OPERATIONS).index(key[0])),
    )
    look = style.looks(operation + where.get(scope, "") for operation, scope in keys)
    ranks, nodes = max(s.ranks for s in samples), max(s.nodes for s in samples)
    words = [f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}"]
    words += [str(about[name]) for name in ("backend", "device") if about.get(name)]
    if wrong := sum(not s.correct for s in samples):
        words.append(f"{wrong} WRONG RESULTS")
    figure, axes = style.new_figure(2, "Collective bandwidth and latency", " | ".join(words))
    fits = {(line.operation, line.scope): line for line in fit_lines(samples)}
    for key, own in zip(keys, look.values(), strict=True):
        rows = sorted((s for s in samples if (s.operation, s.scope) == key), key=lambda s: s.bytes)
        x = [s.bytes for s in rows]
        own["ms"] *= 0.6
        axes[0].plot(x, [s.bus_gb_per_s for s in rows], **own)
        axes[1].plot(x, [s.time_s for s in rows], **own)
        if fit := fits.get(key):
            times = [fit.latency_s + b * fit.s_per_byte for b in x]
            text = "fitted: latency + bytes / bandwidth"
            axes[1].plot(x, times, color=own["color"], lw=0.8, alpha=0.7, label=text)
    said = {"busbw (GB/s)": lambda y, _: f"{y:g}", "time, median": lambda y, _: say_seconds(y)}
    for panel, (label, say) in zip(axes, said.items(), strict=True):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: say_bytes(x)))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(say))
        panel.set_xlabel("message size")
        panel.set_ylabel(label)
    style.legend(figure, axes)
    return figure
