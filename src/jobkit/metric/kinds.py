"""The [METRIC] line: record kinds, fields and units.

jobkit.program.lines has the writer, jobkit.metric.reader the reader.

A record is `[METRIC] ` and one JSON object on one line. Its last field, crc, is the CRC-32 of the
object without it, so that a truncated line is never read as a measurement.
Other programs may print `[METRIC] key=value key=value` instead.
"""

from typing import Any

Record = dict[str, Any]

# Every record has these: seq counts from 0 in each attempt, t is Unix time in seconds.
COMMON = ("v", "kind", "study", "run_id", "attempt", "rank", "seq", "t")

KINDS: dict[str, dict[str, str]] = {
    "run_start": {
        "spec": "settings that differ from the defaults",
        "world_size": "number of ranks",
        "group_size": "ranks of torch.distributed's process group at the first step; null: none",
        "nodes": "number of nodes",
        "node_list": "host names in rank order, comma-separated",
        "device": "name of the device",
        "device_type": "cuda or cpu",
        "backend": "nccl or gloo",
        "devices": "number of GPUs (CPU: processes) that compute: more than world_size with dp",
        "versions": "of python, torch, cuda or hip, nccl and cudnn; on a GPU also fp32, "
        "deterministic, cudnn_benchmark, driver, clocks, power limit and uncorrected ECC errors",
        "git_commit": "Git commit of the code",
        "job_id": "id of the scheduler's job, if any",
        "global_batch_size": "samples in one optimizer step",
        "batch_size_per_rank": "samples in one optimizer step, maximum over ranks",
        "train_samples": "training samples per epoch",
        "test_samples": "test samples",
        "parameters": "parameters of the model",
        "shard_groups": "FSDP: groups of parameters that are gathered and reduced at once",
        "threads": "CPU threads per rank",
        "source": "meter or auto (the start-up hook); absent: jobkit's own training",
        "unit": "what work is counted in: samples, tokens, images, ...; null: not known",
        "work_per_step": "units of work in one optimizer step over all ranks, where it is fixed",
        "work_source": "stated, counted (by the program, at each step) or inferred (from the "
        "batches)",
        "warmup_steps": "optimizer steps at the start of the process that are not compared",
    },
    "startup": {
        "import_s": "import of PyTorch",
        "group_s": "initialisation of the process group",
        "data_s": "loading of the data",
        "model_s": "construction of the model and its parallel wrapper",
        "compile_s": "torch.compile, in the first iteration; null without it",
        "total_s": "from the start of the process to the first iteration",
        "first_step_s": "the first iteration, after total_s; null with torch.compile",
    },
    "epoch": {
        "epoch": "index of the epoch, from 0",
        "iterations": "optimizer steps that this attempt made in it",
        "train_loss": "mean training loss over the samples of the epoch",
        "val_loss": "mean validation loss over all test samples",
        "val_accuracy": "share of correctly classified test samples, 0 to 1",
        "epoch_time_s": "wall time of the timed iterations, maximum over ranks",
        "timed_images": "images trained in epoch_time_s: those of the epoch without the warm-up",
        "images_per_s": "training throughput over all ranks: timed_images / epoch_time_s",
        "eval_time_s": "wall time of the evaluation, maximum over ranks",
        "data_wait_s": "part of epoch_time_s spent waiting for batches, maximum over ranks",
        "peak_memory_mib": "allocated_memory_mib; on the CPU resident_memory_mib",
        "allocated_memory_mib": "peak memory of tensors on a GPU, maximum over ranks",
        "reserved_memory_mib": "peak memory of PyTorch's allocator on a GPU, maximum over ranks",
        "device_memory_mib": "memory of a GPU in use after an epoch by its driver, all processes "
        "and CUDA's context included, maximum over ranks",
        "resident_memory_mib": "peak resident set size of a process, maximum over ranks",
        "lr": "learning rate of the last step",
        "begun_at": "samples of the epoch that an earlier attempt had trained on",
        "values": "other numbers that the program names: columns of epochs.csv by their names",
    },
    "window": {  # some consecutive optimizer steps as one rank measured them; written by each rank
        "step": "index of the last optimizer step in the window, counted from 1 in each process",
        "steps": "optimizer steps in the window",
        "wall_s": "wall time of these steps on this rank, without paused_s",
        "work": "units of work of this rank in the window; null: not known",
        "data_wait_s": "part of wall_s spent waiting for batches; null: not measured",
        "paused_s": "evaluation, checkpoints and other work between the steps, not in wall_s",
        "epoch": "the epoch, as the program numbers it; null: not known",
        "step_p50_s": "median of the steps' times; on a GPU by events on its stream, of the steps "
        "without a pause or an evaluation before them",
        "warmup": "true: steps of the warm-up, not compared",
    },
    "sample": {  # of the machine, by each rank with a GPU and by the first rank of each node
        "at_s": "seconds since the rank's first sample",
        "host": "name of the node",
        "alone": "whether the job has its nodes alone; else a node's energy is not counted",
        "cpu_busy": "load of all cores since the sample before, 0 to 1; of a node's first rank",
        "other_load": "of cpu_busy what is not of the run's own processes",
        "memory_mib": "memory of the node in use, likewise",
        "gpu_busy": "share of the time in which a kernel ran on the rank's GPU, by its driver",
        "gpu_memory_mib": "memory of the rank's GPU in use",
        "gpu_processes": "processes that compute on the rank's GPU, as its driver counts them",
        "gpu_uuids": "hash of the UUIDs of the rank's GPUs: ranks that share them count them once",
        "energy_gpu_j": "energy of the rank's GPU since the first sample, in joules",
        "energy_node_j": "energy of the whole node, likewise",
        "energy_source": "counter and scope of each energy, as pm_counters (node)",
    },
    "why": {  # of some consecutive steps that torch.profiler watched; written by each rank
        "step": "index of the last of these steps",
        "steps": "how many",
        "host": "name of the node",
        "device": "the rank's GPU, as torch names it; null on the CPU",
        "gpu": "whether kernels on a GPU decided; else spans on the CPU",
        "parts": "by step, on a GPU the mean of them: seconds of wall time, compute, exposed "
        "communication, data wait, host",
        "collectives": "by collective: step, name, begin and duration in microseconds",
        "exposed": "exposed communication: begin and end in microseconds",
        "reason": "why nothing could be profiled",
    },
    "difference": {  # of jobkit's own ddp
        "difference_s": "by how much the passes of an iteration take longer than without "
        "all-reduce, which also slows computing; mean over ranks",
        "pairs": "pairs of passes, with and without",
    },
    "checkpoint": {
        "action": "saved, loaded or rejected",
        "iteration": "optimizer steps completed in the checkpoint",
        "epoch": "of a loaded checkpoint: the epoch in which training continues",
        "bytes": "size of the checkpoint",
        "time_s": "duration of the action",
    },
    "comm": {  # of the communication benchmark: one operation at one size
        "operation": "all_reduce, all_gather, reduce_scatter, broadcast, all_to_all or sendrecv",
        "scope": "all: all ranks; intra_node: two ranks of one node; inter_node: of two nodes",
        "ranks": "participating ranks",
        "nodes": "nodes of these ranks",
        "bytes": "message size as in nccl-tests: all_gather: the output, else a rank's buffer",
        "iterations": "timed iterations",
        "time_s": "median over the iterations of the maximum over ranks",
        "time_low_s": "the fastest iteration",
        "time_high_s": "the slowest iteration",
        "algorithm_gb_per_s": "algbw of nccl-tests: bytes / time_s, in 10^9 bytes per second",
        "bus_gb_per_s": "busbw of nccl-tests: algbw x 2(n-1)/n for all_reduce, (n-1)/n for "
        "all_gather, reduce_scatter and all_to_all, 1 for broadcast and sendrecv",
        "correct": "whether the result is correct on every rank",
    },
    "message": {"level": "info, warning or error", "text": "the message, shown in the report"},
    "run_end": {
        "status": "ok, failed or preempted",
        "reason": "cause, if not ok",
        "total_time_s": "from the start of the process",
        "val_loss": "final validation loss",
        "val_accuracy": "final validation accuracy",
    },
}


def number(value: Any) -> float | None:
    """A number of a record; None for anything else, as for one of more than 64 bits."""
    fits = type(value) is float or (type(value) is int and abs(value) < 1 << 63)
    return value if fits else None


def epoch_of(record: Record) -> int | None:
    """The epoch that a record is about; None for a record of steps or of another kind."""
    epoch = record.get("epoch")
    if type(epoch) is not int or record.get("kind", "epoch") != "epoch":
        return None
    return None if "v" not in record and "step" in record else epoch
