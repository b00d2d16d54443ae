"""The columns of every CSV file, TABLES: the one place of their names, types and meanings.

To add a column of results.csv: a field of KINDS if it is recorded, a Column in run_columns.py, its
value in collect/rows.py unless it is a field of run_start or a memory maximum of the epochs.

An empty cell means that the value is not known; no number stands for "unknown". A unit is part of
the name: _s seconds, _mib 2**20 bytes, _share 0 to 1, images_per_s.
"""

from jobkit.analysis.tables.column import COUNT, FLAG, NUMBER, TEXT, Column
from jobkit.analysis.tables.run_columns import EPOCHS, IDENTITY, RESULTS, SIZE, STEPS
from jobkit.metric.kinds import KINDS

_OF_SIZE = ("nodes", "ranks_per_node", "world_size", "scaling")
_OF_BATCH = ("global_batch_size", "batch_size_per_rank")
_CONFIDENCE = "of the interval between runs, at confidence_share; empty without repeats"


def _with_interval(name: str, meaning: str, unit: str = "") -> tuple[Column, ...]:
    """A measured column and the two ends of its interval."""
    return (
        Column(f"{name}{unit}", NUMBER, meaning),
        Column(f"{name}_low{unit}", NUMBER, f"lower end {_CONFIDENCE}"),
        Column(f"{name}_high{unit}", NUMBER, f"upper end {_CONFIDENCE}"),
    )


SCALING = (
    *IDENTITY[1:],
    Column("strategy", TEXT, "parallel strategy"),
    *(c for c in SIZE if c.name in (*_OF_SIZE, *_OF_BATCH)),
    Column("devices", COUNT, "GPUs (CPU: processes) that compute: more than world_size with dp"),
    Column("runs_planned", COUNT, "planned runs of this series at this size"),
    Column("runs_ok", COUNT, "successful runs of these: only they enter the medians"),
    Column(
        "baseline",
        TEXT,
        "the size that speed-up and efficiency are relative to, and the rule that selects it",
    ),
    Column("base_world_size", COUNT, "number of ranks of the baseline"),
    *_with_interval(
        "speed_up",
        "throughput / throughput of the baseline (weak scaling: the scaled speed-up)",
    ),
    *_with_interval("efficiency", "speed_up x devices of the baseline / devices"),
    Column(
        "target_accuracy",
        NUMBER,
        "target validation accuracy: --accuracy, else the highest that all successful runs reached",
    ),
    Column(
        "epochs_to_accuracy",
        NUMBER,
        "epochs to the target, median; empty if a successful run did not reach it",
    ),
    Column(
        "time_to_accuracy_s",
        NUMBER,
        "epochs_to_accuracy x time_s: training only, without start-up and evaluation; "
        "empty where time_of is no epoch",
    ),
    Column(
        "spread_from",
        TEXT,
        "repeats of this size, and over how many sizes their spread is pooled; empty if no size "
        "of the study was repeated",
    ),
    Column("confidence_share", NUMBER, "confidence level of the intervals"),
    Column(
        "not_distinguishable_from",
        TEXT,
        "series at the same size, and the next smaller size of the series, that no test on the "
        "difference tells apart at 95 %; without repeats all of them",
    ),
    Column(
        "outliers", TEXT, "run_ids that are outliers among the repeats; the medians include them"
    ),
    Column("note", TEXT, "why there is no comparison, if there is none"),
    Column(
        "throughput_unit",
        TEXT,
        "unit of throughput: images/s, samples/s, tokens/s, steps/s; of wall times "
        "runs/h, shares/h",
    ),
    *_with_interval("throughput", "rate over all ranks: median of successful repeats"),
    Column("throughput_per_rank", NUMBER, "throughput / ranks; dp: / GPUs"),
    Column("time_of", TEXT, "what time_s is of: epoch, an amount of work as 10M tokens, or run"),
    *_with_interval("time", "time of that: the amount / throughput", "_s"),
    Column("gpu_hours", NUMBER, "time_s x devices / 3600 (CPU: processes)"),
    Column("node_hours", NUMBER, "time_s x nodes / 3600"),
    Column("joules_per_work", NUMBER, "energy per unit of work: median of successful repeats"),
    Column("joules_of", TEXT, "whose energy that is: node or gpu; of Slurm: whole job"),
    Column("energy_kwh", NUMBER, "energy of what time_s is of: an epoch, or an amount of work"),
    Column(
        "kwh_to_accuracy",
        NUMBER,
        "energy_kwh x epochs_to_accuracy: with start-up left out; empty where time_of is no epoch",
    ),
    Column("step_time_s", NUMBER, "time of one optimizer step: median of successful repeats"),
)

_FORECAST = "end of the 95 % prediction interval of one more run"
FORECAST = (
    *IDENTITY[1:],
    Column("kind", TEXT, "forecast: no row of this table is measured"),
    Column(
        "law",
        TEXT,
        "average: of scaling laws, by how well they predict the measured sizes; step model, where "
        "it is taken: from the measured links, without an interval",
    ),
    Column("measured_sizes", TEXT, "world sizes that the forecast was made from"),
    Column("outliers_left_out", COUNT, "runs excluded from the fit as outliers"),
    Column("times_beyond", NUMBER, "world_size / the largest measured size"),
    Column("world_size", COUNT, "number of ranks"),
    *(
        Column(name, NUMBER, meaning)
        for what, unit, text in (
            ("speed_up", "", "throughput / the value of the laws at the baseline"),
            ("efficiency", "", "speed_up x base_world_size / world_size"),
            ("throughput", "", "rate over all ranks, in throughput_unit"),
            ("time", "_s", "time of time_of: an epoch, or an amount of work"),
        )
        for name, meaning in (
            (f"{what}{unit}", f"forecast: {text}"),
            (f"{what}_low{unit}", f"lower {_FORECAST}"),
            (f"{what}_high{unit}", f"upper {_FORECAST}"),
        )
    ),
    Column("throughput_unit", TEXT, "unit of throughput"),
    Column("time_of", TEXT, "what time_s is of"),
)

_SAMPLE_DTYPES = {"host": TEXT, "gpu_uuids": TEXT, "energy_source": TEXT, "alone": FLAG}
SAMPLES = (
    *IDENTITY,
    Column("world_size", COUNT, "number of ranks"),
    Column("repeat", COUNT, "index of the repeat, from 0"),
    Column("attempt", COUNT, "index of the attempt, from 0"),
    Column("rank", COUNT, "the rank that sampled"),
    Column("t", NUMBER, "Unix time in seconds"),
    *(Column(k, _SAMPLE_DTYPES.get(k, NUMBER), text) for k, text in KINDS["sample"].items()),
)

_COMM_DTYPES = {"operation": TEXT, "scope": TEXT, "correct": FLAG}
_COMM_DTYPES |= dict.fromkeys(("ranks", "nodes", "bytes", "iterations"), COUNT)
COMM = tuple(
    Column(name, _COMM_DTYPES.get(name, NUMBER), meaning) for name, meaning in KINDS["comm"].items()
)

_DRILL_MEANINGS = {  # of drill.csv, which `python -m jobkit drill` writes
    "fault": "the injected fault",
    "where": "nodes of the first attempt, or 'here'; empty if the fault is not possible there",
    "first_status": "status of the attempt into which the fault was injected",
    "evidence": "the line of a log or file that shows it",
    "final_status": "status of the run after all attempts",
    "attempts": "number of attempts of the run",
    "detected_s": "from the injection to the end of the first attempt, as the launcher saw it",
    "restart_s": "from the start of the next attempt to its first iteration",
    "iterations_lost": "iterations redone after the restart",
    "same_parameters": "whether the final parameters are bitwise equal to those without a fault",
    "orphans": "leaked processes; empty if they cannot be observed",
    "note": "other deviations from the expected result",
}
_DRILL_DTYPES = dict.fromkeys(("attempts", "iterations_lost", "orphans"), COUNT)
_DRILL_DTYPES |= {"detected_s": NUMBER, "restart_s": NUMBER, "same_parameters": FLAG}
DRILL = tuple(
    Column(name, _DRILL_DTYPES.get(name, TEXT), meaning)
    for name, meaning in _DRILL_MEANINGS.items()
)

# By the file's name without .csv. comm.csv and drill.csv are written by the commands of that name.
TABLES = {
    "results": RESULTS,
    "epochs": EPOCHS,
    "steps": STEPS,
    "samples": SAMPLES,
    "scaling": SCALING,
    "forecast": FORECAST,
    "comm": COMM,
    "drill": DRILL,
}
