"""What is said of the source of a rate: on figures, in the report, in results.csv."""

import pandas as pd
import pytest

from jobkit.analysis.collect.measured import OF_EPOCHS, WALL_TIME
from jobkit.analysis.collect.steps import rate_row
from jobkit.analysis.collect.windows import observed_windows
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.scaling.sizes import SEVERAL_STARTS
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame
from support.measured_study import results_from, runs_of

INFERRED = "count samples inferred from the batches of the loaders"


def study(*sources: tuple[str, str | None]):
    """A study of one series; each size has another source of its rate, and of its work."""
    rows = runs_of({"train": {n: [100.0 * n] for n in range(1, len(sources) + 1)}})
    for row, (source, work) in zip(rows, sources, strict=True):
        row |= {"throughput": row["images_per_s"], "throughput_unit": "samples/s", "model": None}
        row |= {"throughput_source": source, "work_source": work}
    return results_from(frame(rows, RESULTS))


@pytest.mark.parametrize(
    ("sources", "under"),
    [
        ([("auto", "inferred")],
         "measured by the start-up hook, samples inferred from the batches"),
        ([("auto", "stated")], "measured by the start-up hook"),
        ([("lightning", "counted")], "measured by the adapter for Lightning"),
        ([("metric lines", None)], "read from [METRIC] lines"),
        ([("pattern mine", None)], "read by pattern mine"),
        ([(WALL_TIME, None)], WALL_TIME),
        ([(OF_EPOCHS, None)], "measured over epochs of the training"),
        ([("meter", "counted"), ("auto", "stated")],
         "measured by the start-up hook and measured by the meter"),
    ],
)  # fmt: skip
def test_the_figures_say_what_measured(sources, under: str) -> None:
    text = " ".join(subtitle(study(*sources)).split())
    assert text.startswith(f"{under} strong scaling")


def test_a_parameter_called_model_does_not_hide_what_measured() -> None:
    results = study(("auto", "stated"))
    for name in ("model", "dataset", "precision"):
        results.runs[name] = pd.Series(["mine"], dtype="string")
    assert subtitle(results).startswith("measured by the start-up hook")
    results.runs["epochs_planned"] = 2  # of jobkit's own training
    assert subtitle(results).startswith("mine on mine")


def test_the_report_says_that_samples_are_inferred_and_of_which_runs() -> None:
    def said(*sources: tuple[str, str | None]) -> list[str]:
        return [line for line in verdict(study(*sources), "GPUs") if INFERRED in line]

    assert said(("auto", "stated"), ("meter", "counted")) == []
    (line,) = said(("auto", "inferred"), ("auto", "inferred"))
    assert line.startswith(f"The rates {INFERRED}") and "--work-per-step" in line
    (line,) = said(("auto", "inferred"), ("auto", "stated"))
    assert line.startswith("The rates of 1 of 2 runs ")


@pytest.mark.parametrize(
    ("work", "planned", "source"),
    [(4.0, None, "inferred"), (4.0, 8.0, "stated"), (None, None, None)],  # the last has no samples
)
def test_results_csv_has_the_source_of_the_work(work, planned, source: str | None) -> None:
    window = {"attempt": 0, "rank": 0, "step": 10, "steps": 10, "wall_s": 1.0, "work": work}
    start = {"world_size": 1, "source": "auto", "unit": "samples", "work_source": "inferred"}
    observed = observed_windows([window], start, {"work_per_step": planned})
    assert observed is not None
    row = rate_row(observed)
    assert (row["throughput_source"], row.get("work_source")) == ("auto", source)
    assert pd.notna(row["throughput"])


def test_a_run_that_was_started_again_says_why_its_wall_time_is_no_rate() -> None:
    rows = runs_of({"train": {1: [100.0], 2: [200.0]}})
    for row, attempts in zip(rows, (1, 2), strict=True):
        row |= {"attempts": attempts, "throughput_unit": "runs/h", "throughput": 100.0}
        row |= {"throughput_source": WALL_TIME, "images_per_s": None, "train_samples": None}
    rows[1] |= {"throughput": None, "throughput_unit": None}
    results = results_from(frame(rows, RESULTS))
    first, second = results.sizes
    assert first.note is None and second.note == SEVERAL_STARTS
    assert results.scaling["note"].to_list()[1] == SEVERAL_STARTS
    assert f"{rows[1]['run_id']}: {SEVERAL_STARTS}" in results.warnings()
    assert not any(rows[0]["run_id"] in line for line in results.warnings())
