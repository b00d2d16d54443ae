"""The figure of what was learned at each size: final validation loss and accuracy."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import draw_line, legend, lines, mark_not_ok, unit
from jobkit.analysis.figures.style import looks, new_figure, size_axis
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.scaling.sizes import Size

_PANELS = (("val_loss", "final validation loss"), ("val_accuracy", "final validation accuracy"))


def learning_sizes_figure(results: Results) -> Figure | None:
    """Final validation loss and accuracy over world sizes: median and range of the repeats.

    Runs that are ok. Two sizes at the least, else there is nothing to compare.
    """
    found = [s for s in results.sizes if s.world_size]
    ok = results.runs[results.runs["status"] == "ok"]
    panels = [(n, text) for n, text in _PANELS if ok.dropna(subset=[n])["world_size"].nunique() > 1]
    if not panels:
        return None
    title = f"{results.name}: validation loss and accuracy at each size"
    figure, axes = new_figure(len(panels), title, subtitle(results))
    look = looks(s.series for s in found)
    for one, (name, text) in zip(axes, panels, strict=True):
        by_run = {str(k): float(v) for k, v in ok.set_index("run_id")[name].dropna().items()}

        def values(size: Size, by_run: dict[str, float] = by_run) -> tuple[float, ...]:
            return tuple(by_run[r] for r in size.ok_runs if r in by_run)

        for line in lines(found):
            draw_line(one, line, look[line[0].series], values)
        _limits(one, share=name == "val_accuracy")
        mark_not_ok(one, found, look)
        size_axis(one, [s.devices or 0 for s in found], unit(results))
        one.set_ylabel(text)
    legend(figure, axes, look)
    return figure


def _limits(axes: Axes, *, share: bool) -> None:
    """Room around the values, so that a small difference looks small; no share above 100 %."""
    low, high = axes.get_ylim()
    margin = max(0.0, 0.1 * abs(high) - (high - low)) / 2  # the axis spans a tenth of its values
    low, high = max(0.0, low - margin), high + margin
    if share:
        high = min(1.0, high)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        for line in axes.lines:  # a marker at 100 % is drawn whole
            line.set_clip_on(False)
    axes.set_ylim(low, high)
