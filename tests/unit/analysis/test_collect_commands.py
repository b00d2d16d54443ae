"""Runs of a command, as collect reads them."""

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.rows import recorded_spec, unplanned_settings
from jobkit.analysis.tables.series import series_labels
from jobkit.spec.command_spec import CommandSpec
from jobkit.spec.runspec import RunSpec


def test_settings_that_a_command_records_are_not_those_of_the_plan() -> None:
    """The command may be jobkit's own training."""
    start = {"v": 1, "kind": "run_start", "spec": RunSpec(epochs=3).to_dict(), "world_size": 1}
    records = RunRecords([start])
    assert unplanned_settings(CommandSpec(command=("x",)), recorded_spec(records), records) == ""
    assert "epochs=3 (planned: 5)" in unplanned_settings(RunSpec(), recorded_spec(records), records)


def test_a_parameter_makes_a_series_unless_it_follows_from_the_size() -> None:
    specs = {
        f"{batch} at {ranks}": CommandSpec(
            command=("train.py",),
            ranks_per_node=ranks,
            parameters={"batch": batch, "accumulate": 8 // ranks},
            by_size=("accumulate",),
        )
        for batch in (6, 12)
        for ranks in (1, 2)
    }
    labels = series_labels(specs)
    assert labels["6 at 1"] == labels["6 at 2"] == "train, batch=6"
    assert labels["12 at 1"] == "train, batch=12"
