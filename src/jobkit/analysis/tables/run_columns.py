"""The columns of results.csv and epochs.csv."""

import types
import typing
from dataclasses import fields

from jobkit.analysis.tables.column import COUNT, FLAG, NUMBER, TEXT, Column
from jobkit.analysis.tables.use_columns import ENERGY, USE
from jobkit.metric.kinds import KINDS
from jobkit.outcome.state import STATUSES
from jobkit.spec.runspec import RunSpec

IDENTITY = (
    Column("run_id", TEXT, "id of the run: its folder's name, and its key in epochs.csv"),
    Column("study", TEXT, "name of the study's folder"),
    Column(
        "series",
        TEXT,
        "strategy and every setting that varies in the study: runs of one series differ in size "
        "and repeat only",
    ),
)
_OUTCOME = (
    Column("status", TEXT, f"{', '.join(STATUSES[:-1])} or {STATUSES[-1]}"),
    Column("reason", TEXT, "cause, if not ok"),
    Column("evidence", TEXT, "the line of a log or file that shows it"),
    Column("evidence_file", TEXT, "location of that line: RUN_ID/FILE:LINE"),
    Column("exit_code", COUNT, "exit code of the job, if known"),
    Column("attempts", COUNT, "starts of the run; each requeue adds one"),
)
SIZE = (
    Column("strategy", TEXT, "parallel strategy"),
    Column("model", TEXT, "cnn, fast_cnn, resnet18, mlp, or package.module:factory"),
    Column("nodes", COUNT, "number of nodes"),
    Column("ranks_per_node", COUNT, "ranks per node"),
    Column("world_size", COUNT, "number of ranks: nodes x ranks_per_node"),
    Column("scaling", TEXT, "strong: the global batch is constant; weak: the batch per rank is"),
    Column("global_batch_size", COUNT, "samples in one optimizer step over all ranks"),
    Column("batch_size_per_rank", COUNT, "samples in one optimizer step, maximum over ranks"),
    Column("precision", TEXT, "fp32, bf16 or fp16; auto: the run has not begun"),
    Column("repeat", COUNT, "index of the repeat, from 0"),
    Column("epochs_planned", COUNT, "planned epochs"),
    Column("epochs_done", COUNT, "recorded epochs"),
)


def _recorded(kind: str, dtype: str, *names: str) -> tuple[Column, ...]:
    """Columns that hold a field of a record and have its meaning."""
    return tuple(Column(name, dtype, KINDS[kind][name]) for name in names)


_MEASURED = (
    Column(
        "images_per_s",
        NUMBER,
        "training throughput over all ranks, images per second: median over the timed epochs, "
        "without the first epoch of an attempt if there are others",
    ),
    Column(
        "time_per_epoch_s",
        NUMBER,
        "training time of one whole epoch: train_samples / images_per_s; of a program that says "
        "where its epochs end: an epoch's steps x step_time_s",
    ),
    Column("time_per_epoch_min_s", NUMBER, "the same for the fastest of these epochs"),
    Column("time_per_epoch_max_s", NUMBER, "the same for the slowest of these epochs"),
    Column("data_wait_share", NUMBER, "share of these epochs' time spent waiting for batches"),
    Column("startup_s", NUMBER, KINDS["startup"]["total_s"]),
    *(
        Column(f"startup_{name}", NUMBER, f"of startup_s: {meaning}")
        for name, meaning in KINDS["startup"].items()
        if name not in ("total_s", "first_step_s")
    ),
    Column("startup_first_step_s", NUMBER, "the first iteration, which comes after startup_s"),
    Column("total_time_s", NUMBER, "from the start of the process to its end, newest attempt"),
    Column("start_time_s", NUMBER, "Unix time of the first record of the newest attempt"),
    Column("end_time_s", NUMBER, "Unix time of its last record"),
    *_recorded(
        "epoch",
        NUMBER,
        "peak_memory_mib",
        "allocated_memory_mib",
        "reserved_memory_mib",
        "device_memory_mib",
        "resident_memory_mib",
    ),
    Column("train_loss", NUMBER, "training loss of the last recorded epoch"),
    Column("val_loss", NUMBER, "final validation loss; of the last recorded epoch without run_end"),
    Column(
        "val_accuracy", NUMBER, "final validation accuracy, likewise: share of test samples, 0 to 1"
    ),
    Column("best_val_accuracy", NUMBER, "maximum validation accuracy over epochs"),
)
_STEPS = (
    Column("throughput", NUMBER, "rate over all ranks, in throughput_unit, without the warm-up"),
    Column(
        "throughput_unit",
        TEXT,
        "unit of throughput: images/s, samples/s, tokens/s, steps/s; of wall times runs/h, "
        "shares/h",
    ),
    Column(
        "throughput_source",
        TEXT,
        "what measured it: meter, auto, pattern NAME, metric lines, epochs of the training, or the "
        "wall time of the run",
    ),
    Column("step_time_s", NUMBER, "time of one optimizer step, without the warm-up"),
    Column(
        "step_p50_s",
        NUMBER,
        "median time of a step; of windows: the median of theirs, by steps; on a GPU by events on "
        "its stream",
    ),
    Column("step_p95_s", NUMBER, "95th percentile of the time of a step, likewise"),
    Column("step_p99_s", NUMBER, "99th percentile of the time of a step, likewise"),
    Column("step_max_s", NUMBER, "longest time of a step"),
    Column("steps_timed", COUNT, "optimizer steps in these times"),
    Column("wall_time_s", NUMBER, "from the start of the run's job to its end"),
    Column(
        "ranks_together",
        TEXT,
        "of a command on several ranks, what shows that they worked together: process group, "
        "connection, shared memory, network device, stated; none: nothing does, they are copies",
    ),
)
_BREAKDOWN = tuple(
    Column(f"breakdown_{name}", kind, f"of a step: {text}" if kind is NUMBER else text)
    for name, kind, text in (
        ("compute_s", NUMBER, ("seconds of computing: kernels on a GPU, operations of torch on the "
         "CPU; this and the next three are means over the ranks")),
        ("communication_s", NUMBER, ("exposed communication, in which nothing computes; waiting_s "
         "is in it")),
        ("data_wait_s", NUMBER, "waiting for batches; on a GPU while it is idle"),
        ("host_s", NUMBER, "the rest: Python, launches, the program's own code"),
        ("waiting_s", NUMBER, "waiting inside collectives for ranks that come later"),
        ("idle_s", NUMBER, "idle GPU, data_wait_s and host_s together; empty on the CPU"),
        ("last_rank_wait_s", NUMBER, ("waiting for the last rank's end of the step; with the first "
         "four it adds up to iteration_s")),
        ("iteration_s", NUMBER, ("wall time of the profiled steps, maximum over ranks, and "
         "slow_steps_s")),
        ("useful_max_s", NUMBER, "compute and host: of a rank that is late by them, else the mean"),
        ("busy_max_s", NUMBER, ("useful_max_s and data wait, of a rank that is late by that, else "
         "the mean")),
        ("random_imbalance_s", NUMBER, "lost to ranks that are late in turn, with slow_steps_s"),
        ("slow_steps_s", NUMBER, ("by how much the mean step of the whole run is longer than its "
         "typical one, for other reasons than data: rare slow steps; on several ranks also in "
         "communication_s and waiting_s, on one in host_s")),
        ("profiling_share", NUMBER, ("by how much profiled steps are longer than a typical one, "
         "as a share")),
        ("difference_s", NUMBER, ("ddp of jobkit's own training: by how much a step is longer than "
         "without communication, which also slows computing")),
        ("profiled_steps", COUNT, "steps of a rank in these means"),
        ("ranks", COUNT, "ranks that were profiled"),
        ("late_s", NUMBER, "by how much the late rank or node is later than the others"),
        ("late_rank", COUNT, ("the rank that comes last beyond chance; empty where none does, or "
         "where a whole node does")),
        ("late_host", TEXT, "its node, or the node that comes last beyond chance"),
        ("late_device", TEXT, "its GPU"),
        ("late_cause", TEXT, ("what it spends more time with than others: compute, data wait or "
         "host")),
        ("not_profiled", TEXT, "why no step was profiled"),
        ("communication_direct_s", NUMBER, "exposed communication by a second measure"),
        ("certain", FLAG, "whether two measures of communication agree"),
    )
)  # fmt: skip
_WHERE = (
    *_recorded("run_start", COUNT, "train_samples", "test_samples", "parameters"),
    Column("threads_used", COUNT, KINDS["run_start"]["threads"]),
    *_recorded("run_start", TEXT, "device"),
    Column("device_planned", TEXT, "setting: auto, cpu or cuda"),
    *_recorded("run_start", COUNT, "devices"),
    *_recorded("run_start", TEXT, "device_type", "backend"),
    Column("torch_version", TEXT, "version of PyTorch"),
    Column("python_version", TEXT, "version of Python"),
    Column("cuda_version", TEXT, "version of PyTorch's CUDA; empty on the CPU"),
    Column("hip_version", TEXT, "version of PyTorch's HIP, on AMD's GPUs"),
    Column("nccl_version", TEXT, "version of NCCL (AMD: RCCL); empty on the CPU"),
    Column("driver_version", TEXT, "version of the GPU's driver; empty on the CPU"),
    Column("cudnn_version", TEXT, "version of cuDNN; empty on the CPU"),
    Column("cudnn_benchmark", TEXT, "whether cuDNN chose kernels by timing them; likewise"),
    *_recorded("run_start", TEXT, "node_list", "git_commit", "job_id"),
    *_recorded("run_start", COUNT, "shard_groups"),
    Column("warnings", COUNT, "number of warnings and errors that the run recorded"),
    Column("warnings_text", TEXT, "their texts without duplicates, joined by ' | '"),
    Column("lines_rejected", COUNT, "[METRIC] lines rejected (truncated or bad checksum)"),
    Column("records_lost", COUNT, "records missing in every source: sequence gaps"),
)
_SLURM = (
    Column("slurm_state", TEXT, "Slurm state of the job; empty if unknown"),
    Column("slurm_exit_code", TEXT, "Slurm exit code of the job, code:signal (sacct)"),
    Column("slurm_elapsed", TEXT, "elapsed time of the job, [D-]HH:MM:SS (sacct)"),
    Column("slurm_node_list", TEXT, "nodes of the job in Slurm's notation"),
    Column("slurm_alloc_tres", TEXT, "allocated resources (sacct)"),
    Column(
        "slurm_max_rss_mib",
        NUMBER,
        "largest resident set size of a task that Slurm sampled: not a peak (sacct)",
    ),
)


def _setting_dtype(name: str) -> str:
    """The type of a column that holds a setting."""
    hint = typing.get_type_hints(RunSpec)[name]
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]
    return {bool: FLAG, int: COUNT, float: NUMBER, str: TEXT}[hint]


def _setting_columns() -> tuple[Column, ...]:
    """The planned settings that have no column above."""
    taken = {c.name for c in (*IDENTITY, *_OUTCOME, *SIZE, *_MEASURED, *_STEPS, *_WHERE, *_SLURM)}
    taken |= {"epochs"}  # epochs_planned
    return tuple(
        Column(f.name, _setting_dtype(f.name), f"setting: {f.metadata['help']}")
        for f in fields(RunSpec)
        if f.name not in taken
    )


RESULTS = (
    *IDENTITY,
    *_OUTCOME,
    *SIZE,
    *_MEASURED,
    *_BREAKDOWN,
    *_WHERE,
    *_SLURM,
    *_setting_columns(),
    *_STEPS,
    *USE,
    *ENERGY,
    *_recorded("run_start", TEXT, "work_source"),
    Column("problems", TEXT, "what is wrong with the run's records, joined by ' | '"),
)
EPOCHS = (
    *IDENTITY,
    Column("strategy", TEXT, "parallel strategy"),
    Column("world_size", COUNT, "number of ranks"),
    Column("repeat", COUNT, "index of the repeat, from 0"),
    Column("attempt", COUNT, "index of the attempt that trained this epoch, from 0"),
    *(
        Column(name, COUNT if name in ("epoch", "iterations", "timed_images") else NUMBER, meaning)
        for name, meaning in KINDS["epoch"].items()
        if name != "values"  # which are columns by their own names
    ),
)
STEPS = (
    *IDENTITY,
    Column("world_size", COUNT, "number of ranks"),
    Column("repeat", COUNT, "index of the repeat, from 0"),
    Column("attempt", COUNT, "index of the attempt, from 0"),
    Column("step", COUNT, "index of the last step, as the program counts"),
    Column("epoch", COUNT, "the epoch, as the program counts"),
    Column("steps", COUNT, "optimizer steps"),
    Column("warmup", FLAG, "whether they are of the warm-up and not compared"),
    Column("time_s", NUMBER, "wall time of these steps, maximum over ranks, without pauses"),
    Column("throughput", NUMBER, "rate over all ranks, in throughput_unit"),
    Column("throughput_unit", TEXT, "unit of throughput"),
    Column("data_wait_s", NUMBER, "part of time_s spent waiting for batches, maximum over ranks"),
    *(c for c in _STEPS if c.name in ("step_p50_s", "step_p95_s", "step_p99_s", "step_max_s")),
)
