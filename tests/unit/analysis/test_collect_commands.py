"""Runs of a command, as collect reads them."""

from dataclasses import replace

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


def _labels(*commands: str) -> list[str]:
    specs = [CommandSpec(command=tuple(c.split())) for c in commands]
    return list(series_labels({str(i): spec for i, spec in enumerate(specs)}).values())


def test_runs_of_different_commands_are_no_repeats_of_each_other() -> None:
    """The series have the words that differ, an option's value with its option."""
    assert _labels("python fit.py --batch 4", "python fit.py --batch 64") == [
        "fit, --batch 4",
        "fit, --batch 64",
    ]
    assert _labels("python fit.py", "python fit.py --fast", "python fit.py") == [
        "fit",
        "fit, --fast",
        "fit",
    ]
    assert _labels("fit.py --lr 1 --wd 1", "fit.py --lr 1 --wd 2") == ["fit, --wd 1", "fit, --wd 2"]
    assert _labels("fit.py --lr 1", "fit.py --wd 1") == ["fit, --lr 1", "fit, --wd 1"]
    assert _labels("fit.py", "fit.py --lr -1") == ["fit", "fit, --lr -1"]
    # A ; divides the names of series in a table.
    assert _labels("bash -c a;b", "bash -c c") == ["bash, -c a,b", "bash, -c c"]
    # Words of another program say nothing that its name does not.
    assert _labels("python one.py --batch 4", "python two.py") == ["one", "two"]
    assert sorted(_labels("fit.py a b", "fit.py b a")) == ["fit", "fit (variant 2)"]
    long = _labels("fit.py " + "x" * 5000, "fit.py " + "x" * 4999 + "y")
    assert len(set(long)) == 2 and max(map(len, long)) < 300


def test_a_command_without_the_counters_is_a_series_of_its_own() -> None:
    one = CommandSpec(command=("fit.py",))
    found = series_labels({"one": one, "other": replace(one, auto=False)})
    assert found == {"one": "fit, auto", "other": "fit, no auto"}
