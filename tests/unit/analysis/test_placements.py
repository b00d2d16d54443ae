"""Sizes that are not one rank a GPU on the fewest nodes: several placements, dp, mixed versions."""

from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import interval_of, lines
from jobkit.analysis.figures.scaling import forecast_figure, speed_up_figure
from jobkit.analysis.figures.throughput import throughput_figure
from jobkit.analysis.findings.forecast import forecasts
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.report.proposal import proposal_table
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame
from support.measured_study import results_from, runs_of


def placed(rates: dict[tuple[int, int], list[float]]) -> Results:
    """A study of ddp with these rates, by nodes and ranks per node."""
    rows: list[dict[str, Any]] = []
    for (nodes, each), own in rates.items():
        for row in runs_of({"ddp": {nodes * each: own}}):
            of_node = {"nodes": nodes, "ranks_per_node": each}
            rows.append(row | of_node | {"run_id": f"{nodes}x{each}-{row['repeat']}"})
    return results_from(frame(rows, RESULTS))


SEVERAL = {
    (1, 4): [400.0, 401, 399],
    (2, 2): [350.0, 351, 349],
    (4, 1): [280.0, 281, 279],
    (1, 8): [790.0, 791, 789],
    (2, 4): [700.0, 701, 699],
    (1, 16): [1584.0, 1585, 1583],
}


def test_the_request_follows_the_sizes_on_the_fewest_nodes() -> None:
    """It was "Request 4 GPUs on 2 nodes: speed-up 0.88", as 4 on 4 nodes are below 80 %."""
    said = verdict(placed(SEVERAL), "GPUs")
    assert any(line.startswith("Request 16 GPUs with ddp: speed-up 3.96 ") for line in said)
    assert not [line for line in said if "falls below" in line]
    (line,) = [line for line in said if "on more nodes" in line]
    assert line.startswith("With as many GPUs on more nodes, ddp on 4 GPUs on 4 nodes has 70.0% [")
    assert line.endswith("parallel efficiency relative to 4 GPUs, the least of 3 such sizes.")
    said = verdict(placed({k: v for k, v in SEVERAL.items() if k in ((1, 4), (4, 1))}), "GPUs")
    assert not [line for line in said if "Request" in line or "at one size only" in line]
    assert any(line.startswith("With as many GPUs on more nodes") for line in said)


def test_a_forecast_says_which_of_several_placements_it_is_made_from() -> None:
    (one,) = forecasts(placed(SEVERAL), (32,))
    assert one.caution.startswith("the forecast of ddp uses its sizes on one node only, so what ")
    alone = {k: v for k, v in SEVERAL.items() if k[0] == 1}
    (one,) = forecasts(placed(alone), (32,))
    assert one.caution.startswith("every measured size of ddp is on one node, ")


def labels(axes: Axes) -> list[str]:
    return sorted(text.get_text() for text in axes.texts)


def test_lines_on_more_nodes_are_labelled() -> None:
    results = placed(SEVERAL)
    for figure in (speed_up_figure(results), forecast_figure(results, forecasts(results, (32,)))):
        assert figure is not None
        assert labels(figure.axes[0]) == ["2 nodes", "4 nodes"]
        drawn = [
            list(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() == "o"
        ]
        assert drawn == [[4, 8, 16], [4, 8], [4]]
        plt.close(figure)


@pytest.fixture
def with_dp() -> Results:
    """The one process of dp computes on 4 GPUs."""
    series = {"ddp": {1: [100.0, 101, 99], 2: [190.0, 191, 189]}, "dp": {1: [380.0, 381, 379]}}
    runs = frame(runs_of(series), RESULTS)
    runs["devices"] = runs["world_size"].where(runs["series"] != "dp", 4)
    runs["strategy"] = runs["series"]
    return results_from(runs)


def test_each_line_beyond_the_fewest_nodes_has_one_number_of_nodes() -> None:
    many = placed({(1, 4): [4.0], (2, 2): [3.0], (2, 4): [8.0], (4, 2): [7.0], (4, 1): [2.0]})
    drawn = [[(s.nodes, s.ranks_per_node) for s in line] for line in lines(many.sizes)]
    assert drawn == [[(1, 4), (2, 4)], [(2, 2)], [(4, 1), (4, 2)]]


def test_dp_counts_as_the_gpus_that_it_computes_on(with_dp: Results) -> None:
    assert verdict(with_dp, "GPUs")[0].startswith("Strong scaling: the fastest is dp on 4 GPUs, ")
    table = proposal_table(with_dp.scaling, "GPUs")
    gpus = table.heads.index("GPUs")
    assert {(row[0], row[gpus]) for row in table.rows} == {("ddp", "1"), ("ddp", "2"), ("dp", "4")}
    (dp,) = [size for size in with_dp.sizes if size.series == "dp"]
    low, high = interval_of(dp, "throughput_per_rank")
    assert low is not None and high is not None and dp.throughput_per_rank == 95
    assert low < 95 < high
    figure = throughput_figure(with_dp)
    assert figure is not None
    for axes, rate in zip(figure.axes, (380, 95), strict=True):
        assert [4, rate] in [[*map(float, line.get_xydata()[0])] for line in axes.lines]
    plt.close(figure)


def test_a_series_that_must_not_be_compared_is_not_the_fastest_of_those_that_can() -> None:
    """There was no request at all, and the fastest was "not told apart" from the sound series."""
    series = {"ddp": {1: [100.0, 101], 2: [202.0, 203]}, "fsdp": {1: [99.0, 100], 2: [200.0, 202]}}
    runs = frame(runs_of(series), RESULTS)
    mixed = (runs["series"] == "ddp") & (runs["world_size"] == 2)
    runs["torch_version"] = runs["torch_version"].where(~mixed, "2.12.0")
    said = verdict(results_from(runs), "GPUs")
    start = "Strong scaling: the fastest of the series that can be compared is fsdp on 2 GPUs, "
    (fastest,) = [line for line in said if line.startswith(start)]
    assert "ddp" not in fastest
    assert any(line.startswith("Request 2 GPUs with fsdp: ") for line in said)
    assert any(line.startswith("ddp: not compared: torch_version differs") for line in said)
    runs = runs[runs["series"] == "ddp"]
    said = verdict(results_from(runs), "GPUs")
    assert any("the fastest is ddp on 2 GPUs" in line for line in said)
    assert not [line for line in said if "Request" in line]
