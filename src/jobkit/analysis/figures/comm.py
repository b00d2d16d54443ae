"""`python -m jobkit plot-comm`: the figure of the communication benchmark."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.metric.comm import OPERATIONS, SCOPES, Sample, fit_lines, read_csv
from jobkit.paths import RunPaths, logs_root, read_json
from jobkit.units import say_bytes, say_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    args = parser.parse_args(argv)
    for path in draw(args.run or newest()):
        print(f"wrote {path}")
    return Exit.OK


def newest() -> Path:
    """The folder of the newest benchmark; raises UsageError where there is none."""
    folders = [(p.stat().st_mtime, p.parent) for p in logs_root().glob("comm/*/comm.csv")]
    if not folders:
        raise UsageError(f"no comm.csv in {logs_root() / 'comm'}: run python -m jobkit comm first")
    return max(folders)[1]


def draw(folder: Path) -> list[Path]:
    """Draw one benchmark; returns the files. Raises UsageError for a folder without one."""
    from jobkit.analysis.figures.style import FORMATS, rc, save

    paths = RunPaths(folder)
    samples = read_csv(paths.comm_csv)
    if not samples:
        raise UsageError(f"{paths.comm_csv} has no rows")
    files = [paths.comm_csv.with_suffix(f".{kind}") for kind in FORMATS]
    with rc():
        figure = comm_figure(samples, read_json(paths.comm_json) or {})
        try:
            save(figure, *files)
        except OSError as error:
            raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None
    return files


def comm_figure(samples: Sequence[Sample], about: dict[str, Any]) -> "Figure":
    """busbw and time over the message size, a line for each operation, with the fitted lines.

    about: the content of comm.json, for the line under the title.
    """
    from jobkit.analysis.figures import style
    from jobkit.analysis.tables.text import counted

    where = {"intra_node": ", intra-node", "inter_node": ", inter-node"}
    order = sorted(
        samples, key=lambda s: (SCOPES.index(s.scope), list(OPERATIONS).index(s.operation))
    )
    names = {(s.operation, s.scope): s.operation + where.get(s.scope, "") for s in order}
    look = style.looks(names.values())
    ranks, nodes = max(s.ranks for s in samples), max(s.nodes for s in samples)
    words = [f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}"]
    words += [str(about[name]) for name in ("backend", "device") if about.get(name)]
    if wrong := sum(not s.correct for s in samples):
        words.append(f"{wrong} WRONG RESULTS")
    figure, axes = style.new_figure(2, "Collective bandwidth and latency", " | ".join(words))
    fits = {(line.operation, line.scope): line for line in fit_lines(samples)}
    for key, name in names.items():
        rows = sorted((s for s in samples if (s.operation, s.scope) == key), key=lambda s: s.bytes)
        x, size = [s.bytes for s in rows], 0.6 * look[name].size
        style.plot_line(axes[0], x, [s.bus_gb_per_s for s in rows], look[name], ms=size)
        style.plot_line(axes[1], x, [s.time_s for s in rows], look[name], ms=size)
        if fit := fits.get(key):
            times = [fit.latency_s + b * fit.s_per_byte for b in x]
            axes[1].plot(x, times, color=look[name].colour, lw=0.8, alpha=0.7)
    _size_axes(axes)
    axes[0].set_ylabel("busbw (GB/s)")
    axes[1].set_ylabel("time, median")
    fitted = style.entry("fitted: latency + bytes / bandwidth", lw=0.8)
    style.legend_below(figure, [*style.series_entries(look, 6), fitted])
    return figure


def _size_axes(axes: Sequence["Axes"]) -> None:
    """Both axes logarithmic; sizes in KiB, MiB, GiB, and values as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: say_bytes(x)))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.set_xlabel("message size")
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes[1].yaxis.set_major_formatter(FuncFormatter(lambda y, _: say_seconds(y)))
