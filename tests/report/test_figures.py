"""The figures: what is plotted is read back from the axes, not from pixels."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.figures.by_size import BY_SIZE, comparison_figure, size_figure
from jobkit.analysis.figures.draw import FIGURES, draw, learning_figure
from jobkit.analysis.figures.style import FAILED, FORMATS, IDEAL, INTERVAL, RANGE, looks
from jobkit.analysis.figures.why import why_figure
from jobkit.analysis.findings.forecast import forecasts
from support.fake_study import (
    TRAIN_SAMPLES,
    FakeRun,
    epoch_fields,
    made_up_step,
    make_plan,
    realistic_study,
    whole_run,
    whole_study,
)

SIZES = (1, 2, 4)
SAME = pytest.approx


def study(*plans: dict[str, Any], **fields: Any) -> Results:
    """A study of these plans, or of ddp with these fields."""
    for plan in plans or ({"strategies": ("ddp",), "gpus": SIZES} | fields,):
        whole_study(**plan)
    return collect("s", write=False)


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two series with repeats; the middle one is 2 % faster than the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOBKIT_LOGS", str(tmp_path_factory.mktemp("logs")))
        return study(strategies=("ddp", "fsdp"), repeats=3)


def made(figure: Figure | None) -> Figure:
    assert figure is not None
    figure.canvas.draw()
    return figure


def measured(axes: Axes) -> list[Line2D]:
    """The lines of medians: those with the marker of a series."""
    return [line for line in axes.lines if line.get_marker() not in ("None", "x", "", "_", None)]


def labelled(axes: Axes, label: str) -> list[Line2D]:
    return [line for line in axes.lines if line.get_label() == label]


def values(line: Line2D) -> list[float]:
    return [float(y) for y in line.get_ydata()]


def sizes_of(axes: Axes) -> list[list[int]]:
    return sorted([int(x) for x in line.get_xdata()] for line in measured(axes))


def ticks(axes: Axes) -> list[str]:
    low, high = axes.get_xlim()
    shown = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    return [label.get_text() for x, label in shown if low <= x <= high]


def test_all_in_every_format_not_blank_the_same_bytes_again_and_the_old_ones_removed() -> None:
    whole_study(strategies=("ddp", "fsdp"), gpus=(1, 2), repeats=2)
    results = collect("s")
    stale = results.paths.figures / "why.png"
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    paths = draw(results)
    names = [one.name for one in FIGURES if one.name != "why"]
    absent = {*names} - {path.stem for path in paths}
    assert not absent, f"add the fields that they show to tests/support/fake_study.py: {absent}"
    assert [p.name for p in paths] == [f"{n}.{k}" for n in names for k in FORMATS]
    assert sorted(stale.parent.iterdir()) == sorted(paths)
    for path in paths:
        if path.suffix == ".png":
            assert np.std(imread(path)[..., :3]) > 0.02
        else:
            assert path.read_bytes().startswith((b"%PDF-1", b"<?xml"))
    first = [p.read_bytes() for p in paths[:6]]
    assert [p.read_bytes() for p in draw(results)[:6]] == first


TIMES = [TRAIN_SAMPLES / (1.02 * x) for x in (1000, 1900, 3700)]
GOAL = [3.0001 * t for t in TIMES]
OF_DDP = "relative to ddp on 1 rank"  # which is faster than fsdp there: the base of both
# Of ddp by figure: label and scale of each panel, its medians, and the ideal at 4 ranks.
PANELS: dict[str, list[tuple[str, str, list[float], float | None]]] = {
    "time_per_epoch": [("time per epoch (s)", "log", TIMES, TIMES[0] / 4)],
    "throughput": [
        ("throughput (images/s)", "log", [1020, 1938, 3774], 4080),
        ("throughput per rank (images/s)", "linear", [1020, 969, 943.5], 1020),
    ],
    "speed_up": [("speed-up", "log", [1, 1.9, 3.7], 4)],
    "efficiency": [("parallel efficiency", "linear", [1, 0.95, 0.925], 1)],
    "time_to_accuracy": [("time to 73% accuracy (s)", "log", GOAL, GOAL[0] / 4)],
    "peak_memory": [("peak memory per rank, resident (MiB)", "linear", [902] * 3, None)],
    "loss_and_accuracy_by_size": [
        ("final validation loss", "linear", [0.71] * 3, None),
        ("final validation accuracy", "linear", [1 - 0.8 / 3] * 3, None),
    ],
}


def test_a_figure_says_how_often_its_sizes_ran(strong: Results) -> None:
    few = (strong.runs["world_size"] == 1) | (strong.runs["repeat"] == 1)
    figure = made(size_figure(replace(strong, runs=strong.runs[few]), "throughput"))
    assert "strong scaling | 1 to 3 repeats" in figure.axes[0].get_title(loc="left")


@pytest.mark.parametrize("name", PANELS)
def test_a_value_over_sizes_with_its_ideal(name: str, strong: Results) -> None:
    figure = made(size_figure(strong, name))
    text = figure._suptitle.get_text() + figure.axes[0].get_title(loc="left")
    for words in ("s: ", "Some Processor", "auto", "strong scaling", "3 repeats"):
        assert words in text
    assert (OF_DDP in text) == (name in ("speed_up", "efficiency"))
    for axes, (label, scale, medians, ideal) in zip(figure.axes, PANELS[name], strict=True):
        assert (axes.get_ylabel(), axes.get_yscale(), axes.get_xscale()) == (label, scale, "log")
        assert ticks(axes) == ["1", "2", "4"] and sizes_of(axes) == [[1, 2, 4]] * 2
        assert values(measured(axes)[0]) == SAME(medians, rel=1e-3)
        lines = labelled(axes, IDEAL)
        assert [values(line)[-1] for line in lines[:1]] == SAME([ideal] if ideal else [], rel=1e-3)
        assert ideal is None or list(lines[0].get_xdata())[::64] == SAME([1, 4])


def test_sizes_that_must_not_be_compared_are_points_without_a_line(strong: Results) -> None:
    copies = strong.runs["series"] == "fsdp"
    runs = strong.runs.assign(ranks_together=copies.map({True: "none", False: None}))
    (axes,) = made(size_figure(replace(strong, runs=runs), "time_per_epoch")).axes
    shown = [(line.get_label(), line.get_linestyle()) for line in measured(axes)]
    assert shown == [("ddp", "-"), ("fsdp: not compared", "None")]


def test_bars_are_ranges_of_repeats_or_intervals_between_runs(strong: Results) -> None:
    table = strong.scaling.iloc[2]  # ddp on 4 ranks
    bars = {"speed_up": [table["speed_up_low"], table["speed_up_high"]]}
    bars |= {"efficiency": [table["efficiency_low"], table["efficiency_high"]]}
    for name, ends in bars.items():
        found = [values(one) for one in labelled(made(size_figure(strong, name)).axes[0], INTERVAL)]
        assert ends[0] < ends[1] and SAME(ends) in found
    full = replace(strong, runs=strong.runs.assign(val_accuracy=1.0))
    loss, accuracy = made(size_figure(full, "loss_and_accuracy_by_size")).axes
    assert values(labelled(loss, RANGE)[0]) == SAME([0.70, 0.72])
    assert accuracy.get_ylim()[1] == 1 and loss.get_ylim()[0] < 0.68  # 2 % do not fill the page
    (memory,) = made(size_figure(strong, "peak_memory")).axes
    assert memory.get_ylim()[0] == 0


def test_sizes_stand_at_their_real_places_and_one_kind_of_scaling_is_drawn() -> None:
    one = {"strategies": ("ddp",), "gpus": SIZES}
    both = study(one, one | {"settings": {"batch_size_per_rank": 128}})
    figure = made(size_figure(both, "throughput"))
    assert figure._suptitle.get_text().endswith(", strong scaling")
    assert [len(measured(a)) for a in figure.axes] == [1] * 2
    whole_study(strategies=("ddp",), gpus=(3, 6))
    (axes,) = made(size_figure(collect("s", write=False), "time_per_epoch")).axes
    assert (axes.get_xscale(), ticks(axes)) == ("linear", ["1", "2", "3", "4", "6"])


def test_runs_that_are_not_ok_are_marked_at_their_size() -> None:
    plan = make_plan(strategies=("ddp", "fsdp"), gpus=(1, 8))
    for run_id, spec in plan.runs.items():
        if (spec.strategy, spec.world_size) == ("fsdp", 8):
            run = FakeRun(plan.paths.folder, run_id, spec).begin().train(0)
            run.end("failed", "rank 0: torch.OutOfMemoryError: CUDA out of memory", 1)
        else:
            whole_run(plan, run_id)
    results = collect("s")
    for name in ("time_per_epoch", "peak_memory"):
        (axes,) = made(size_figure(results, name)).axes
        (cross,) = labelled(axes, FAILED)
        assert list(cross.get_xdata()) == [8]
        assert sizes_of(axes) == [[1], [1, 8]]
    axes = made(learning_figure(results)).axes[0]
    assert [list(c.get_xdata()) for c in labelled(axes, FAILED)] == [[1]]


def test_learning_curves() -> None:
    figure = made(learning_figure(study(gpus=(1, 2), repeats=3)))
    spec = next(iter(make_plan("x", strategies=("ddp",), gpus=(1,)).runs.values()))
    for axes, name in zip(figure.axes, ("val_loss", "val_accuracy"), strict=True):
        lines = measured(axes)
        middle = [epoch_fields(replace(spec, repeat=1), e)[name] for e in range(3)]
        assert values(lines[0]) == SAME(middle) and list(lines[0].get_xdata()) == [1, 2, 3]
        assert len({line.get_linestyle() for line in lines}) == len(lines) == 2  # one a size


def test_one_size_is_no_curve_and_one_series_no_comparison() -> None:
    results = study(gpus=(2,))
    assert [name for name in BY_SIZE if size_figure(results, name)] == []
    assert comparison_figure(results) is None and why_figure(results) is None


def test_a_forecast_begins_where_the_measured_ends_and_widens() -> None:
    results = study(repeats=2)
    (axes,) = made(size_figure(results, "speed_up", forecasts(results, (6, 8))[0])).axes
    (line,) = labelled(axes, "forecast: not measured")
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (4, SAME(8))
    (band,) = (c for c in axes.collections if c.get_label() == "95 % prediction interval")
    vertices = band.get_paths()[0].vertices
    first, last = (vertices[np.isclose(vertices[:, 0], x), 1] for x in (4, 8))
    assert last.max() / last.min() > first.max() / first.min() > 1


def test_the_breakdown_stacks_to_the_iteration() -> None:
    plan = realistic_study(sizes=(1, "2x4"), repeats=1)
    figure = made(why_figure(collect("s", write=False)))
    above = figure.axes[0]
    bars = [[p for p in above.patches if round(p.get_x() + 0.37) == i] for i in range(2)]
    assert [max(p.get_y() + p.get_height() for p in bar) for bar in bars] == SAME([100, 100])
    own = [s for s in plan.runs.values() if s.strategy == "ddp"]
    _, specs = (made_up_step(s) for s in sorted(own, key=lambda s: s.world_size))
    parts = [rank["parts"][0] for rank in specs]
    step = parts[0][0]
    assert above.texts[-1].get_text() == f"{step:.3g}"  # in seconds
    exposed, waiting = (bars[1][i].get_height() / 100 for i in (1, 2))
    assert exposed == SAME(1 - max(x[0] - x[2] for x in parts) / step, abs=0.001)
    assert exposed + waiting == SAME(sum(x[2] for x in parts) / len(parts) / step)
    labels = [axes.get_xlabel() for axes in figure.axes[:3]]
    assert labels == ["GPUs\nddp", "GPUs\nfsdp", "GPUs\npp"]


def test_series_are_compared_at_the_largest_size_that_most_have() -> None:
    two = {"strategies": ("ddp", "fsdp"), "gpus": (1, 2)}
    figure = made(comparison_figure(study(two, {"strategies": ("ddp",), "gpus": (8,)})))
    rates, memory, efficiency = figure.axes
    assert [bar.get_width() for bar in rates.patches] == SAME([1900, 1520])
    assert [bar.get_width() for bar in memory.patches] == [902, 452]
    assert [t.get_text() for t in efficiency.texts] == ["95%", "76%"]
    assert rates.get_ylim()[0] > rates.get_ylim()[1]  # the first series stands on top


def test_many_series_look_different() -> None:
    found = list(looks(f"series {i}" for i in range(12)).values())
    for one, other in itertools.pairwise(found):
        assert all(one[name] != other[name] for name in ("color", "marker", "ls"))
