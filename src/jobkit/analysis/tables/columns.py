"""The columns of results.csv, epochs.csv and scaling.csv: where each is named and explained.

An empty cell means that the logs do not say; no number stands for "unknown". A unit is part of the
name: _s seconds, _mib 2**20 bytes, _share 0 to 1, images_per_s.
"""

import types
import typing
from dataclasses import dataclass, fields

from jobkit.metric.line import KINDS
from jobkit.outcome.status import STATUSES
from jobkit.spec.runspec import RunSpec


@dataclass(frozen=True)
class Column:
    """A column: its name with the unit in it, what a cell holds, and what it means."""

    name: str
    dtype: str  # of pandas, one that knows an absent value
    meaning: str


TEXT, COUNT, NUMBER, FLAG = "string", "Int64", "Float64", "boolean"

_IDENTITY = (
    Column("run_id", TEXT, "the run's folder and its key in epochs.csv"),
    Column("study", TEXT, "the study's folder"),
    Column(
        "series",
        TEXT,
        "strategy and each setting that varies in the study: "
        "runs of one series differ in size and repeat only",
    ),
)
_OUTCOME = (
    Column("status", TEXT, f"{', '.join(STATUSES[:-1])} or {STATUSES[-1]}"),
    Column("reason", TEXT, "why, when not ok"),
    Column("evidence", TEXT, "the line that proves it"),
    Column("evidence_file", TEXT, "where that line stands: RUN_ID/FILE:LINE"),
    Column("exit_code", COUNT, "the job's, where it is known"),
    Column("attempts", COUNT, "starts of the run; a requeue makes another"),
)
_SIZE = (
    Column("strategy", TEXT, "parallel strategy"),
    Column("model", TEXT, "cnn, resnet18, mlp, or package.module:factory"),
    Column("nodes", COUNT, "nodes"),
    Column("ranks_per_node", COUNT, "ranks on each node"),
    Column("world_size", COUNT, "ranks in all: nodes x ranks_per_node"),
    Column("scaling", TEXT, "strong: the global batch is fixed; weak: the batch of a rank is"),
    Column("global_batch_size", COUNT, "samples in one optimizer step over all ranks"),
    Column("batch_size_per_rank", COUNT, "samples in one optimizer step on the fullest rank"),
    Column("precision", TEXT, "fp32, bf16 or fp16"),
    Column("repeat", COUNT, "which repeat of the same settings, from 0"),
    Column("epochs_planned", COUNT, "epochs that the run is to train"),
    Column("epochs_done", COUNT, "epochs that left a record"),
)
_MEASURED = (
    Column(
        "images_per_s",
        NUMBER,
        "training images a second over all ranks: median over the timed epochs, "
        "without the first of an attempt where there are others",
    ),
    Column("time_per_epoch_s", NUMBER, "train_samples / images_per_s: training of one whole epoch"),
    Column("time_per_epoch_min_s", NUMBER, "the same from the fastest of those epochs"),
    Column("time_per_epoch_max_s", NUMBER, "the same from the slowest of those epochs"),
    Column("data_wait_share", NUMBER, "part of those epochs' time spent waiting for batches"),
    Column("startup_s", NUMBER, "from the start of the process to the first iteration"),
    Column("total_time_s", NUMBER, "from the start of the process to its end, newest attempt"),
    Column("peak_memory_mib", NUMBER, "allocated on the fullest GPU (CPU: resident in a process)"),
    Column("allocated_memory_mib", NUMBER, "peak of tensors on the fullest GPU; empty on the CPU"),
    Column("reserved_memory_mib", NUMBER, "reserved on the fullest GPU; empty on the CPU"),
    Column("resident_memory_mib", NUMBER, "peak resident set of the fullest process, on the host"),
    Column(
        "held_memory_mib",
        NUMBER,
        "parameters, gradients, optimizer state and buffers of the fullest rank, measured",
    ),
    Column("predicted_memory_mib", NUMBER, "the same, predicted from the shapes before the start"),
    Column("train_loss", NUMBER, "of the last epoch that left a record"),
    Column("val_loss", NUMBER, "at the end; of the last epoch where the run left no end"),
    Column("val_accuracy", NUMBER, "share of the test samples, at the end or of the last epoch"),
    Column("best_val_accuracy", NUMBER, "the highest of all epochs"),
)
_OF_STEP = "of the breakdown record with the median iteration: "
_BREAKDOWN = tuple(
    Column(f"breakdown_{name}", NUMBER, f"{_OF_STEP}{meaning}")
    for name, meaning in KINDS["breakdown"].items()
    if name != "iterations"
)
_WHERE = (
    Column("train_samples", COUNT, "training samples in an epoch"),
    Column("test_samples", COUNT, "test samples"),
    Column("parameters", COUNT, "parameters of the model"),
    Column("threads_used", COUNT, "CPU threads of a rank"),
    Column("device", TEXT, "name of the device that was used"),
    Column("device_planned", TEXT, "setting: auto, cpu or cuda"),
    Column("device_type", TEXT, "cuda or cpu"),
    Column("backend", TEXT, "nccl or gloo"),
    Column("torch_version", TEXT, "PyTorch"),
    Column("python_version", TEXT, "Python"),
    Column("cuda_version", TEXT, "CUDA of PyTorch; empty on the CPU"),
    Column("nccl_version", TEXT, "NCCL; empty on the CPU"),
    Column("node_list", TEXT, "host names in rank order"),
    Column("git_commit", TEXT, "commit of the code"),
    Column("job_id", TEXT, "the scheduler's id of the job"),
    Column("warnings", COUNT, "warnings and errors that the run recorded"),
    Column("warnings_text", TEXT, "their texts, each once, joined by ' | '"),
    Column("lines_rejected", COUNT, "tagged places of the logs that hold no whole record"),
    Column("records_lost", COUNT, "records missing in every source, told by gaps in their numbers"),
)
_SLURM = (
    Column("slurm_state", TEXT, "Slurm's word for the job; empty where it had none"),
    Column("slurm_exit_code", TEXT, "Slurm's code:signal of the job (sacct)"),
    Column("slurm_elapsed", TEXT, "Slurm's elapsed time of the job, [D-]HH:MM:SS"),
    Column("slurm_node_list", TEXT, "nodes of the job, as Slurm writes them"),
    Column("slurm_alloc_tres", TEXT, "what was allocated (sacct)"),
    Column("slurm_max_rss_mib", NUMBER, "largest resident task that Slurm sampled: not a peak"),
)


def _setting_dtype(name: str) -> str:
    """The type of a column that holds a setting."""
    hint = typing.get_type_hints(RunSpec)[name]
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]
    return {bool: FLAG, int: COUNT, float: NUMBER, str: TEXT}[hint]


def _setting_columns() -> tuple[Column, ...]:
    """Every setting of the training that has no column of its own above, as it was planned."""
    taken = {c.name for c in (*_IDENTITY, *_OUTCOME, *_SIZE, *_MEASURED, *_WHERE, *_SLURM)}
    taken |= {"epochs"}  # epochs_planned
    return tuple(
        Column(f.name, _setting_dtype(f.name), f"setting: {f.metadata['help']}")
        for f in fields(RunSpec)
        if f.name not in taken
    )


RESULTS = (
    *_IDENTITY,
    *_OUTCOME,
    *_SIZE,
    *_MEASURED,
    *_BREAKDOWN,
    *_WHERE,
    *_SLURM,
    *_setting_columns(),
)
EPOCHS = (
    *_IDENTITY,
    Column("strategy", TEXT, "parallel strategy"),
    Column("world_size", COUNT, "ranks in all"),
    Column("repeat", COUNT, "which repeat of the same settings, from 0"),
    Column("attempt", COUNT, "the start of the run that this epoch is of, from 0"),
    *(
        Column(name, COUNT if name in ("epoch", "iterations", "timed_images") else NUMBER, meaning)
        for name, meaning in KINDS["epoch"].items()
    ),
)

_OF_SIZE = ("nodes", "ranks_per_node", "world_size", "scaling")
_OF_BATCH = ("global_batch_size", "batch_size_per_rank")
_CONFIDENCE = "of the bootstrap interval over spread_from, at confidence_share"


def _with_interval(name: str, meaning: str, unit: str = "") -> tuple[Column, ...]:
    """A measured column and the two ends of its interval."""
    return (
        Column(f"{name}{unit}", NUMBER, meaning),
        Column(f"{name}_low{unit}", NUMBER, f"lower end {_CONFIDENCE}"),
        Column(f"{name}_high{unit}", NUMBER, f"upper end {_CONFIDENCE}"),
    )


SCALING = (
    *_IDENTITY[1:],
    Column("strategy", TEXT, "parallel strategy"),
    *(c for c in _SIZE if c.name in (*_OF_SIZE, *_OF_BATCH)),
    Column("runs_planned", COUNT, "runs of this series at this size"),
    Column("runs_ok", COUNT, "of these, the runs that are ok: they alone are measured here"),
    Column("baseline", TEXT, "what speed-up and efficiency are relative to, and by which rule"),
    Column("base_world_size", COUNT, "ranks of the baseline"),
    *_with_interval("images_per_s", "training images a second: median over the runs that are ok"),
    Column("images_per_s_per_rank", NUMBER, "images_per_s / world_size: throughput of a GPU"),
    *_with_interval("time_per_epoch", "train_samples / images_per_s", "_s"),
    *_with_interval(
        "speed_up",
        "images_per_s / images_per_s of the baseline (weak scaling: the scaled speed-up)",
    ),
    *_with_interval("efficiency", "speed_up x base_world_size / world_size"),
    Column("gpu_hours_per_epoch", NUMBER, "time_per_epoch_s x world_size / 3600 (CPU: processes)"),
    Column("node_hours_per_epoch", NUMBER, "time_per_epoch_s x nodes / 3600"),
    Column(
        "target_accuracy",
        NUMBER,
        "the validation accuracy asked for; without one, what every run that is ok has reached",
    ),
    Column("epochs_to_accuracy", NUMBER, "median; empty where a run that is ok did not reach it"),
    Column(
        "time_to_accuracy_s",
        NUMBER,
        "epochs_to_accuracy x time_per_epoch_s: training alone, without start-up and evaluation",
    ),
    Column("spread_from", TEXT, "what the intervals are over: repeats, or the epochs of one run"),
    Column(
        "confidence_share",
        NUMBER,
        "0.95; less where the values are so few that even their whole range says less",
    ),
    Column(
        "not_distinguishable_from",
        TEXT,
        "series at the same size, and the size before in the series, whose interval overlaps",
    ),
    Column("outliers", TEXT, "run_ids whose rate does not fit the other repeats; they are kept"),
    Column("note", TEXT, "why there is no comparison, where there is none"),
)

_FORECAST = "end of the prediction interval: where one more run lies with 95 %"
FORECAST = (
    *_IDENTITY[1:],
    Column("kind", TEXT, "forecast: no row of this table was measured"),
    Column("law", TEXT, "the law that was fitted: amdahl, usl or gustafson"),
    Column("measured_sizes", TEXT, "the world sizes that it was fitted to"),
    Column("outliers_left_out", COUNT, "runs that it was not fitted to: their rate does not fit"),
    Column("times_beyond", NUMBER, "world_size / the largest measured size"),
    Column("world_size", COUNT, "ranks in all"),
    *(
        Column(name, NUMBER, meaning)
        for what, unit, text in (
            ("images_per_s", "", "training images a second"),
            ("time_per_epoch", "_s", "train_samples / images_per_s"),
            ("speed_up", "", "images_per_s / the law's rate at the baseline"),
            ("efficiency", "", "speed_up x base_world_size / world_size"),
        )
        for name, meaning in (
            (f"{what}{unit}", f"forecast: {text}"),
            (f"{what}_low{unit}", f"lower {_FORECAST}"),
            (f"{what}_high{unit}", f"upper {_FORECAST}"),
        )
    ),
)

# Of comm.csv, which the communication benchmark writes.
_KINDS_OF_COMM = {"operation": TEXT, "scope": TEXT, "correct": FLAG}
_KINDS_OF_COMM |= dict.fromkeys(("ranks", "nodes", "bytes", "iterations"), COUNT)
COMM = tuple(
    Column(name, _KINDS_OF_COMM.get(name, NUMBER), meaning)
    for name, meaning in KINDS["comm"].items()
)


def markdown(columns: tuple[Column, ...]) -> str:
    """The columns as a Markdown table, for the README."""
    lines = ["| column | meaning |", "|---|---|"]
    cells = (c.meaning.replace("|", "\\|") for c in columns)
    return "\n".join(
        [*lines, *(f"| `{c.name}` | {t} |" for c, t in zip(columns, cells, strict=True))]
    )
