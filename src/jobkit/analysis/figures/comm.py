"""`python -m jobkit plot-comm`: the figure of the communication benchmark."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.metric.comm import OPERATIONS, SCOPES, Line, Sample, fit_lines, read_csv
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
    """Draw comm.png and comm.svg beside comm.csv; return the exit code."""
    parser = Parser(
        prog="jobkit plot-comm",
        description="Plot busbw and latency over the message size, from comm.csv.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="folder of a benchmark (default: the newest)",
    )
    args = parser.parse_args(argv)
    for path in draw(args.run or newest()):
        print(f"wrote {path}")
    return Exit.OK


def newest() -> Path:
    """The folder of the newest benchmark; raises UsageError where there is none."""
    found = [(p.stat().st_mtime, p.parent) for p in logs_root().glob("comm/*/comm.csv")]
    if not found:
        raise UsageError(f"no comm.csv in {logs_root() / 'comm'}: run python -m jobkit comm first")
    return max(found)[1]


def draw(folder: Path) -> list[Path]:
    """Draw one benchmark; returns the files. Raises UsageError for a folder without one."""
    from jobkit.analysis.figures.style import rc, save

    paths = RunPaths(folder)
    found = read_csv(paths.comm_csv)
    if not found:
        raise UsageError(f"{paths.comm_csv} has no rows")
    files = [paths.comm_csv.with_suffix(suffix) for suffix in (".png", ".svg")]
    with rc():
        figure = comm_figure(found, read_json(paths.comm_json) or {})
        try:
            save(figure, *files)
        except OSError as error:
            raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None
    return files


def comm_figure(found: Sequence[Sample], about: dict[str, Any]) -> "Figure":
    """busbw and time over the message size, a line for each operation, with the fitted lines.

    about: the content of comm.json, for the line under the title.
    """
    from matplotlib.lines import Line2D

    from jobkit.analysis.figures.style import GREY, legend_below, looks, new_figure

    kept = sorted(found, key=lambda s: (SCOPES.index(s.scope), list(OPERATIONS).index(s.operation)))
    names = {(s.operation, s.scope): _label(s) for s in kept}
    look = looks(names.values())
    figure, axes = new_figure(2, "Collective bandwidth and latency", _subtitle(found, about))
    fits = {(one.operation, one.scope): one for one in fit_lines(found)}
    for key, name in names.items():
        own = sorted((s for s in found if (s.operation, s.scope) == key), key=lambda s: s.bytes)
        _draw(axes[0], own, [s.bus_gb_per_s for s in own], look[name])
        _draw(axes[1], own, [s.time_s for s in own], look[name])
        if key in fits:
            _draw_fit(axes[1], own, fits[key], look[name].colour)
    _size_axes(axes)
    axes[0].set_ylabel("busbw (GB/s)")
    axes[1].set_ylabel("time, median")
    handles = [
        Line2D([], [], color=one.colour, marker=one.marker, ms=6, ls=one.dashes, label=name)
        for name, one in look.items()
    ]
    text = "fitted: latency + bytes / bandwidth"
    legend_below(figure, [*handles, Line2D([], [], color=GREY, lw=0.8, label=text)])
    return figure


def _label(one: Sample) -> str:
    where = {"intra_node": ", intra-node", "inter_node": ", inter-node"}
    return one.operation + where.get(one.scope, "")


def _subtitle(found: Sequence[Sample], about: dict[str, Any]) -> str:
    from jobkit.analysis.tables.text import counted

    ranks, nodes = max(s.ranks for s in found), max(s.nodes for s in found)
    words = [f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}"]
    words += [str(about[name]) for name in ("backend", "device") if about.get(name)]
    wrong = sum(not s.correct for s in found)
    return " | ".join(words + [f"{wrong} WRONG RESULTS"] * bool(wrong))


def _draw(axes: "Axes", own: Sequence[Sample], values: Sequence[float], look: Any) -> None:
    axes.plot(
        [s.bytes for s in own],
        values,
        color=look.colour,
        marker=look.marker,
        ms=0.6 * look.size,
        ls=look.dashes,
        lw=look.width,
        zorder=look.layer,
    )


def _draw_fit(axes: "Axes", own: Sequence[Sample], line: Line, colour: str) -> None:
    x = [s.bytes for s in own]
    axes.plot(x, [line.latency_s + b * line.s_per_byte for b in x], color=colour, lw=0.8, alpha=0.7)


def _size_axes(axes: Sequence["Axes"]) -> None:
    """Both axes logarithmic; sizes in KiB, MiB, GiB, and values as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for one in axes:
        one.set_xscale("log", base=2)
        one.set_yscale("log")
        one.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
        one.xaxis.set_minor_locator(NullLocator())
        one.xaxis.set_major_formatter(FuncFormatter(lambda x, _: say_bytes(x)))
        one.yaxis.set_minor_locator(NullLocator())
        one.set_xlabel("message size")
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes[1].yaxis.set_major_formatter(FuncFormatter(lambda y, _: say_seconds(y)))
