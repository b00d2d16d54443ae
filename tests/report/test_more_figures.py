"""The figures of throughput, breakdown, learning at every size, comparison and memory."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from test_figures import ideals, made, measured, ticks

from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.figures.breakdown import breakdown_figure
from jobkit.analysis.figures.comparison import comparison_figure
from jobkit.analysis.figures.draw import FIGURES
from jobkit.analysis.figures.learning import learning_figure
from jobkit.analysis.figures.learning_sizes import learning_sizes_figure
from jobkit.analysis.figures.loss import loss_figure
from jobkit.analysis.figures.memory import predicted_memory_figure
from jobkit.analysis.figures.style import _columns
from jobkit.analysis.figures.throughput import throughput_figure, time_to_accuracy_figure
from support.fake_study import TRAIN_SAMPLES, whole_study
from support.realistic_study import made_up_step, realistic_study

SIZES = (1, 2, 4)


def collected(**fields) -> Results:
    whole_study(**fields)
    return collect("s", write=False)


def test_every_figure_has_a_name_of_its_own_and_a_caption() -> None:
    assert len({one.name for one in FIGURES}) == len(FIGURES)
    assert [one.name for one in FIGURES if not one.caption.endswith(".")] == []


def test_throughput_of_all_and_of_each_with_their_ideals() -> None:
    results = collected(strategies=("ddp",), gpus=SIZES)
    total, each = made(throughput_figure(results)).axes
    assert list(measured(total)[0].get_ydata()) == pytest.approx([1000, 1900, 3700])
    assert list(measured(each)[0].get_ydata()) == pytest.approx([1000, 950, 925])
    assert each.get_ylim()[0] == 0
    (ideal,), (flat,) = ideals(total), ideals(each)
    assert list(ideal.get_ydata()) == pytest.approx(1000 * np.asarray(ideal.get_xdata()))
    assert set(flat.get_ydata()) == {1000}
    assert (total.get_ylabel(), each.get_ylabel()) == ("images/s", "images/s per process")
    assert ticks(total) == ticks(each) == ["1", "2", "4"]


def test_strong_and_weak_throughput_have_rows_of_their_own() -> None:
    whole_study(strategies=("ddp",), gpus=SIZES)
    results = collected(strategies=("ddp",), gpus=SIZES, settings={"batch_size_per_rank": 128})
    figure = made(throughput_figure(results))
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert [label.rsplit(", ")[-1] for label in labels] == ["strong scaling"] * 2 + [
        "weak scaling"
    ] * 2
    lines = [[line for line in measured(a) if line.get_marker() != "_"] for a in figure.axes]
    assert [len(own) for own in lines] == [1] * 4


def test_time_to_accuracy_and_its_ideal() -> None:
    results = collected(strategies=("ddp",), gpus=SIZES)
    (axes,) = made(time_to_accuracy_figure(results)).axes
    # 73 % is what all have after the third epoch.
    expected = [3 * TRAIN_SAMPLES / r for r in (1000, 1900, 3700)]
    assert list(measured(axes)[0].get_ydata()) == pytest.approx(expected)
    (ideal,) = ideals(axes)
    assert (ideal.get_ydata()[0], ideal.get_ydata()[-1]) == pytest.approx(
        (expected[0], expected[0] / 4)
    )
    assert axes.get_ylabel() == "time to 73% accuracy (s)"


def test_one_size_is_no_line_of_throughput_or_learning() -> None:
    results = collected(strategies=("ddp",), gpus=(2,))
    for make in (
        throughput_figure,
        time_to_accuracy_figure,
        loss_figure,
        learning_sizes_figure,
    ):
        assert make(results) is None


def test_loss_of_every_size_over_epochs_and_over_time() -> None:
    results = collected(strategies=("ddp", "fsdp"), gpus=SIZES)
    figure = made(loss_figure(results))
    assert len(figure.axes) == 4
    above, below = figure.axes[0], figure.axes[2]
    assert [len(axes.lines) for axes in figure.axes] == [3] * 4
    first, second = TRAIN_SAMPLES / 500, TRAIN_SAMPLES / 1000  # DDP on one rank
    assert list(above.lines[0].get_xdata()) == [1, 2, 3]
    assert list(below.lines[0].get_xdata())[:2] == pytest.approx([first, first + second])
    assert list(above.lines[0].get_ydata()) == list(below.lines[0].get_ydata())
    assert len({to_hex(line.get_color()) for line in above.lines}) == 3
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["1 process", "2 processes", "4 processes"]


def test_weak_scaling_names_the_batch_of_each_size() -> None:
    results = collected(strategies=("ddp",), gpus=SIZES, settings={"batch_size_per_rank": 128})
    (legend,) = made(loss_figure(results)).legends
    assert [t.get_text() for t in legend.get_texts()][2] == "4 processes (global batch 512)"


def test_the_breakdown_stacks_to_the_iteration() -> None:
    plan = realistic_study("s", sizes=(1, "2x4"), repeats=1)
    figure = made(breakdown_figure(collect("s", write=False)))
    own = (s for s in plan.runs.values() if s.strategy == "ddp")
    specs = sorted(own, key=lambda s: s.world_size)
    above, below = figure.axes[0], figure.axes[3]
    tops = [max(p.get_y() + p.get_height() for p in above.patches[i::2]) for i in range(2)]
    assert tops == pytest.approx([made_up_step(s)["iteration_s"] for s in specs])
    shares = [p.get_height() for p in below.patches[1::2]]
    assert sum(shares) == pytest.approx(1)
    step = made_up_step(specs[1])
    busiest = step["busy_max_s"] / step["iteration_s"]
    assert shares[1] == pytest.approx(1 - busiest)
    assert sum(shares[1:3]) == pytest.approx(step["communication_s"] / step["iteration_s"])
    assert above.get_ylabel() == "seconds per iteration"
    assert [t.get_text() for t in below.get_xticklabels()] == ["1", "8"]
    assert [axes.get_xlabel() for axes in figure.axes[3:]] == [
        "GPUs\nddp", "GPUs\nfsdp", "GPUs\npp"
    ]  # fmt: skip


def test_without_breakdown_records_there_is_no_such_figure() -> None:
    assert breakdown_figure(collected(strategies=("ddp",), gpus=SIZES)) is None


def test_series_are_compared_at_the_largest_size_that_most_have() -> None:
    whole_study(strategies=("ddp", "fsdp"), gpus=(1, 2))
    results = collected(strategies=("ddp",), gpus=(8,))
    figure = made(comparison_figure(results))
    assert "side by side at 2 processes" in figure._suptitle.get_text()
    rates, memory, efficiency = figure.axes
    assert [bar.get_width() for bar in rates.patches] == pytest.approx([1900, 1520])
    assert [bar.get_width() for bar in memory.patches] == [902, 452]
    assert [t.get_text() for t in efficiency.texts] == ["95%", "95%"]
    assert "its smallest size" in efficiency.get_xlabel()
    assert [t.get_text() for t in rates.get_yticklabels()] == ["ddp", "fsdp"]
    assert rates.get_ylim()[0] > rates.get_ylim()[1]  # the first series stands on top


def test_one_process_stands_beside_the_parallel_ones_at_their_largest_size() -> None:
    results = collected(strategies=("single", "ddp", "fsdp"), gpus=SIZES, repeats=2)
    figure = made(comparison_figure(results))
    assert "side by side at 4 processes" in figure._suptitle.get_text()
    rates, _, efficiency = figure.axes
    labels = [t.get_text() for t in rates.get_yticklabels()]
    assert labels == ["single\nat 1", "ddp", "fsdp"]
    expected = [1010, 3.7 * 1010, 3.7 * 808]
    assert [bar.get_width() for bar in rates.patches] == pytest.approx(expected)
    assert [t.get_text() for t in efficiency.texts] == ["100%", "92%", "74%"]
    assert efficiency.get_xlabel().endswith("relative to single")


def test_loss_and_accuracy_over_sizes_with_their_repeats() -> None:
    results = collected(strategies=("ddp",), gpus=SIZES, repeats=3)
    loss, accuracy = made(learning_sizes_figure(results)).axes
    (line,) = measured(loss)
    assert list(line.get_xdata()) == [1, 2, 4]
    assert list(line.get_ydata()) == pytest.approx([0.71] * 3)
    points = next(c for c in loss.collections if len(c.get_offsets()) == 9)
    assert sorted(set(points.get_offsets()[:, 1].round(4))) == [0.70, 0.71, 0.72]
    assert list(measured(accuracy)[0].get_ydata()) == pytest.approx([1 - 0.8 / 3] * 3)
    assert ticks(accuracy) == ["1", "2", "4"]


@pytest.mark.parametrize("share", [0.9, 0.99, 1.0])
def test_no_axis_of_accuracy_goes_above_all_of_it(share: float) -> None:
    results = collected(strategies=("ddp",), gpus=SIZES)
    runs = results.runs.assign(val_accuracy=share)
    epochs = results.epochs.assign(val_accuracy=share)
    results = replace(results, runs=runs, epochs=epochs)
    for make in (learning_sizes_figure, learning_figure):
        assert made(make(results)).axes[-1].get_ylim()[1] <= 1


def test_one_series_is_no_comparison() -> None:
    assert comparison_figure(collected(strategies=("ddp",), gpus=SIZES)) is None


def test_predicted_memory_is_told_apart_from_measured() -> None:
    results = collected(strategies=("ddp", "fsdp"), gpus=SIZES)
    ranks = results.runs["world_size"]
    runs = results.runs.assign(predicted_memory_mib=700.0 / ranks, held_memory_mib=710.0 / ranks)
    (axes,) = made(predicted_memory_figure(replace(results, runs=runs))).axes
    rings = [line for line in measured(axes) if line.get_markerfacecolor() == "none"]
    dots = [line for line in measured(axes) if line.get_markerfacecolor() != "none"]
    assert [list(line.get_ydata()) for line in rings] == [[700, 350, 175]] * 2
    assert [list(line.get_ydata()) for line in dots] == [[710, 355, 177.5]] * 2
    assert axes.get_ylim()[0] == 0
    for name in ("predicted_memory_mib", "held_memory_mib"):
        without = runs.assign(**{name: runs[name].where(runs["world_size"] > 9)})
        assert predicted_memory_figure(replace(results, runs=without)) is None


@pytest.mark.parametrize("count", range(1, 14))
def test_the_legend_fits_its_room(count: int) -> None:
    """By columns as matplotlib fills them: the first ones have one entry more."""
    lengths = [10 + 7 * (i % 4) for i in range(count)]
    columns = _columns(lengths, 90)
    split = [list(part) for part in np.array_split(lengths, columns)]
    assert columns == 1 or sum(max(part) for part in split) <= 90
