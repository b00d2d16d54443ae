"""The figures: what is plotted is read back from the axes, not from pixels."""

import itertools

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from jobkit.analysis.collect.results import collect
from jobkit.analysis.figures.draw import draw
from jobkit.analysis.figures.epoch_time import time_figure
from jobkit.analysis.figures.learning import learning_figure
from jobkit.analysis.figures.memory import memory_figure
from jobkit.analysis.figures.scaling import efficiency_figure, forecast_figure, speed_up_figure
from jobkit.analysis.figures.style import looks
from jobkit.analysis.findings.forecast import forecasts
from jobkit.spec.plan import Plan
from support.fake_study import (
    TRAIN_SAMPLES,
    FakeRun,
    epoch_fields,
    make_plan,
    rate,
    whole_run,
    whole_study,
)

SIZES = (1, 2, 4)


def made(figure: Figure | None) -> Figure:
    assert figure is not None
    ConstrainedLayoutEngine().execute(figure)  # as before its files are written
    figure.canvas.draw()
    return figure


def measured(axes: Axes) -> list[Line2D]:
    """The lines of medians: those with the marker of a series."""
    return [line for line in axes.lines if line.get_marker() not in ("None", "x", "", None)]


def ideals(axes: Axes) -> list[Line2D]:
    return [line for line in axes.lines if str(line.get_label()).startswith("ideal")]


def crosses(axes: Axes) -> list[Line2D]:
    return [line for line in axes.lines if line.get_marker() == "x"]


def ticks(axes: Axes) -> list[str]:
    low, high = axes.get_xlim()
    shown = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    return [label.get_text() for x, label in shown if low <= x <= high]


def test_the_figures_as_png_and_svg_that_are_not_blank_and_the_same_bytes_again() -> None:
    whole_study(strategies=("ddp", "fsdp"), gpus=SIZES, repeats=2)
    drawn = draw(collect("s"))
    names = (
        "time_per_epoch", "throughput", "speed_up", "efficiency", "comparison",
        "loss_and_accuracy", "loss_and_accuracy_by_size", "loss_every_size",
        "time_to_accuracy", "peak_memory",
    )  # fmt: skip
    assert [p.name for p in drawn.paths] == [f"{n}.{k}" for n in names for k in ("png", "svg")]
    for path in drawn.paths:
        if path.suffix == ".png":
            assert np.std(imread(path)[..., :3]) > 0.02
        else:
            assert "<svg" in path.read_text()
    assert len(list(drawn.paths[0].parent.iterdir())) == 2 * len(names)
    first = {p: p.read_bytes() for p in drawn.paths}
    assert {p: p.read_bytes() for p in draw(collect("s")).paths} == first


def test_time_per_epoch_strong() -> None:
    plan = whole_study(strategies=("ddp",), gpus=SIZES, repeats=3)
    (axes,) = made(time_figure(collect("s"))).axes
    assert (axes.get_yscale(), axes.get_xscale()) == ("log", "log")
    assert ticks(axes) == ["1", "2", "4"]
    (line,) = measured(axes)
    assert list(line.get_xdata()) == [1, 2, 4]
    middle = {s.world_size: rate(s) for s in plan.runs.values() if s.repeat == 1}
    assert list(line.get_ydata()) == pytest.approx([TRAIN_SAMPLES / middle[n] for n in SIZES])
    (ideal,) = ideals(axes)
    product = np.asarray(ideal.get_xdata()) * np.asarray(ideal.get_ydata())
    assert product == pytest.approx(line.get_ydata()[0])  # time x ranks is what it is at 1 rank
    assert (min(ideal.get_xdata()), max(ideal.get_xdata())) == pytest.approx((1, 4))
    # The band reaches from the fastest to the slowest repeat, and each is a point.
    band = axes.collections[0].get_paths()[0].vertices
    every = [TRAIN_SAMPLES / rate(s) for s in plan.runs.values()]
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((min(every), max(every)))
    points = next(c for c in axes.collections if len(c.get_offsets()) == len(plan.runs))
    assert sorted(points.get_offsets()[:, 1]) == pytest.approx(sorted(every))
    assert axes.get_ylabel() == "time per epoch (s)"


def test_time_per_epoch_weak_has_a_flat_ideal() -> None:
    plan = whole_study(strategies=("ddp",), gpus=SIZES, settings={"batch_size_per_rank": 128})
    (axes,) = made(time_figure(collect("s"))).axes
    (line,), (ideal,) = measured(axes), ideals(axes)
    rates = {s.world_size: rate(s) for s in plan.runs.values()}
    assert list(line.get_ydata()) == pytest.approx([TRAIN_SAMPLES * n / rates[n] for n in SIZES])
    assert set(ideal.get_ydata()) == {line.get_ydata()[0]}
    assert "ranks" in axes.get_ylabel()


def test_strong_and_weak_have_panels_of_their_own() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2))
    whole_study(strategies=("ddp",), gpus=(1, 2), settings={"batch_size_per_rank": 128})
    assert [len(measured(a)) for a in made(time_figure(collect("s"))).axes] == [1, 1]


def test_sizes_that_do_not_double_stand_at_their_real_places() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2, 3, 6))
    (axes,) = made(time_figure(collect("s"))).axes
    assert axes.get_xscale() == "linear"
    assert ticks(axes) == ["1", "2", "3", "6"]
    (line,) = measured(axes)
    assert list(line.get_xdata()) == [1, 2, 3, 6]


def test_the_same_ranks_on_other_nodes_are_another_line() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2, "2x1", 4, "2x2"))
    (axes,) = made(time_figure(collect("s"))).axes
    assert sorted(list(line.get_xdata()) for line in measured(axes)) == [[1, 2, 4], [2, 4]]


def failed_study() -> Plan:
    plan = make_plan(strategies=("ddp", "fsdp"), gpus=(1, 8))
    for run_id, spec in plan.runs.items():
        if (spec.strategy, spec.world_size) == ("fsdp", 8):
            run = FakeRun(plan.paths.folder, run_id, spec).begin().train(0)
            run.end("failed", "rank 0: torch.OutOfMemoryError: CUDA out of memory", 1)
        else:
            whole_run(plan, run_id)
    return plan


@pytest.mark.parametrize("make", [time_figure, memory_figure])
def test_runs_that_are_not_ok_are_marked_at_their_size(make) -> None:
    failed_study()
    (axes,) = made(make(collect("s"))).axes
    (cross,) = crosses(axes)
    assert cross.get_xdata() == [8]
    assert [t.get_text() for t in axes.texts] == ["fsdp: oom"]
    assert [list(line.get_xdata()) for line in measured(axes)] == [[1, 8], [1]]
    # No point of a line lies so low that a mark could hide it.
    low = min(min(line.get_ydata()) for line in measured(axes))
    to_axes = axes.transData + axes.transAxes.inverted()
    mark = cross.get_transform().transform((8, cross.get_ydata()[0]))
    room = to_axes.transform((8, low))[1] - axes.transAxes.inverted().transform(mark)[1]
    assert room > 0.05


def test_memory_starts_at_zero_and_names_its_unit() -> None:
    whole_study(strategies=("ddp", "fsdp"), gpus=SIZES)
    (axes,) = made(memory_figure(collect("s"))).axes
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylabel() == "peak memory per process, resident (MiB)"
    assert [list(line.get_ydata()) for line in measured(axes)] == [[902] * 3, [902, 452, 227]]


def test_learning_curves() -> None:
    plan = whole_study(strategies=("ddp",), gpus=(1, 2), repeats=3)
    figure = made(learning_figure(collect("s")))
    for axes, name in zip(figure.axes, ("val_loss", "val_accuracy"), strict=True):
        lines = measured(axes)
        assert len(lines) == 2  # one a size
        spec = next(s for s in plan.runs.values() if s.repeat == 1)
        expected = [epoch_fields(spec, e)[name] for e in range(3)]
        assert list(lines[0].get_ydata()) == pytest.approx(expected)
        assert list(lines[0].get_xdata()) == [1, 2, 3]
    assert len({line.get_linestyle() for line in measured(figure.axes[0])}) == 2


def test_learning_curves_of_a_run_that_is_not_ok_end_in_a_cross() -> None:
    failed_study()
    axes = made(learning_figure(collect("s"))).axes[0]
    assert [list(c.get_xdata()) for c in crosses(axes)] == [[1]]
    assert len(measured(axes)) == 3


def test_many_sizes_show_the_smallest_and_the_largest() -> None:
    whole_study(strategies=("ddp", "fsdp"), gpus=(1, 2, 4, 8))
    figure = made(learning_figure(collect("s")))
    assert len(measured(figure.axes[0])) == 4
    assert "smallest and largest size" in figure._suptitle.get_text()


def test_the_title_says_what_was_measured() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2), repeats=2, settings={"global_batch_size": 256})
    figure = made(time_figure(collect("s")))
    text = figure._suptitle.get_text() + figure.axes[0].get_title(loc="left")
    for words in ("s: time per epoch", "Some Processor", "fp32", "global batch 256", "2 repeats"):
        assert words in text


def test_no_two_neighbours_look_alike_in_any_way() -> None:
    found = list(looks(f"series {i}" for i in range(12)).values())
    for one, other in itertools.pairwise(found):
        assert one.colour != other.colour
        assert one.marker != other.marker
        assert one.dashes != other.dashes
    assert len({(o.colour, o.marker, str(o.dashes)) for o in found}) == 12


def test_a_figure_with_nothing_to_show_is_not_drawn_and_an_old_one_is_removed() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1,))
    (run_id,) = plan.runs
    FakeRun(plan.paths.folder, run_id, plan.runs[run_id]).begin().train(0).flush()
    stale = plan.paths.figures / "time_per_epoch.png"
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    drawn = draw(collect("s"))
    assert list(drawn.missing) == ["time_per_epoch", "speed_up", "efficiency", "peak_memory"]
    assert not stale.exists()
    assert [p.name for p in drawn.paths] == ["loss_and_accuracy.png", "loss_and_accuracy.svg"]


def intervals(axes: Axes) -> list[tuple[float, float]]:
    """The bars of the intervals, as (low, high)."""
    bars = [c.get_paths() for c in axes.collections if len(c.get_paths()) == len(SIZES)]
    return [tuple(sorted(p.vertices[:, 1])) for paths in bars for p in paths]


def test_speed_up_and_its_ideal() -> None:
    whole_study(strategies=("ddp", "fsdp"), gpus=SIZES, repeats=2)
    results = collect("s")
    (axes,) = made(speed_up_figure(results)).axes
    lines = [line for line in measured(axes) if line.get_marker() != "_"]
    assert [list(line.get_ydata()) for line in lines] == [pytest.approx([1, 1.9, 3.7])] * 2
    (ideal,) = ideals(axes)
    assert list(ideal.get_ydata()) == pytest.approx(list(ideal.get_xdata()))
    table = results.scaling
    assert intervals(axes)[2] == pytest.approx(
        (table["speed_up_low"][2], table["speed_up_high"][2])
    )
    assert ticks(axes) == ["1", "2", "4"]
    assert axes.get_ylabel() == "speed-up\nrelative to 1 rank"


def test_efficiency_starts_at_zero_and_has_its_interval() -> None:
    whole_study(strategies=("ddp",), gpus=SIZES, repeats=2)
    results = collect("s")
    (axes,) = made(efficiency_figure(results)).axes
    assert axes.get_ylim()[0] == 0
    assert list(measured(axes)[0].get_ydata()) == pytest.approx([1, 0.95, 0.925])
    assert set(ideals(axes)[0].get_ydata()) == {1}
    low, high = results.scaling["efficiency_low"][2], results.scaling["efficiency_high"][2]
    assert low < 0.925 < high
    assert intervals(axes)[2] == pytest.approx((low, high))


def test_one_size_is_no_curve_of_speed_up() -> None:
    whole_study(strategies=("ddp",), gpus=(2,))
    assert speed_up_figure(collect("s")) is None
    assert efficiency_figure(collect("s")) is None


def test_the_same_ranks_on_other_nodes_are_another_line_of_speed_up() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2, "2x1", 4, "2x2"))
    (axes,) = made(speed_up_figure(collect("s"))).axes
    lines = [line for line in measured(axes) if line.get_marker() != "_"]
    assert sorted(list(line.get_xdata()) for line in lines) == [[1, 2, 4], [2, 4]]


def test_a_line_goes_through_the_fewest_nodes_in_every_figure() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2, 4, "2x2", "2x4"))
    results = collect("s", write=False)
    for make in (time_figure, speed_up_figure, memory_figure):
        (axes,) = made(make(results)).axes
        lines = [line for line in measured(axes) if line.get_marker() != "_"]
        assert [list(line.get_xdata()) for line in lines] == [[1, 2, 4, 8], [4]]


def test_a_forecast_begins_where_the_measured_ends_and_widens() -> None:
    whole_study(strategies=("ddp",), gpus=SIZES, repeats=2)
    results = collect("s")
    found = forecasts(results, (8, 16))
    figure = made(forecast_figure(results, found))
    (axes,) = figure.axes
    (line,) = (one for one in axes.lines if one.get_label() == "forecast")
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (4, pytest.approx(16))
    assert line.get_linestyle() == "--"
    band = next(c for c in axes.collections if len(c.get_paths()[0].vertices) > 60)
    y = {round(x, 6): [] for x in band.get_paths()[0].vertices[:, 0]}
    for x, value in band.get_paths()[0].vertices:
        y[round(x, 6)].append(value)
    assert max(y[16]) / min(y[16]) > max(y[4]) / min(y[4]) > 1
    assert "not measured" in figure._suptitle.get_text()
    assert forecast_figure(results, forecasts(results)) is None


def test_many_series_leave_room_for_the_axes() -> None:
    sweep = {"lr": tuple(0.01 * i for i in (1, 2, 3, 4, 8)), "momentum": (0.8, 0.85, 0.9, 0.95)}
    sweep["precision"] = ("fp32", "bf16")
    whole_study(strategies=("ddp",), gpus=(1, 2), sweep=sweep, settings={"epochs": 1})
    results = collect("s")
    for make in (time_figure, speed_up_figure):
        figure = made(make(results))
        (legend,) = figure.legends
        for axes in figure.axes:
            box = axes.get_window_extent()
            assert box.y0 > legend.get_window_extent().y1
            assert box.height / figure.dpi > 2
