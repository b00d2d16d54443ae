"""The [METRIC] line: record kinds, fields, units and the writer. jobkit.metric.reader reads it.

A record is `[METRIC] ` and one JSON object on one line of at most 1,000 bytes. Its last field, crc,
is the CRC-32 of the object without it, so that a truncated line is never read as a measurement.
Other programs may print `[METRIC] key=value key=value` instead.
"""

import json
import math
import time
import zlib
from pathlib import Path
from typing import Any, TextIO

SCHEMA_VERSION = 1
TAG = "[METRIC]"
MAX_LINE_BYTES = 1000  # srun tears longer lines

# Every record has these: seq counts from 0 in each attempt, t is Unix time in seconds.
COMMON = ("v", "kind", "study", "run_id", "attempt", "rank", "seq", "t")

KINDS: dict[str, dict[str, str]] = {
    "run_start": {
        "spec": "settings that differ from the defaults",
        "world_size": "ranks",
        "nodes": "nodes",
        "node_list": "host names in rank order, one text",
        "device": "name of the device",
        "device_type": "cuda or cpu",
        "backend": "nccl or gloo",
        "versions": "python, torch, cuda, nccl",
        "git_commit": "commit of the code",
        "job_id": "the scheduler's id of the job, if any",
        "global_batch_size": "samples in one optimizer step",
        "batch_size_per_rank": "samples in one optimizer step on the fullest rank",
        "train_samples": "training samples",
        "test_samples": "test samples",
        "parameters": "parameters of the model",
        "threads": "CPU threads of a rank",
        "predicted_memory_mib": "parameters, gradients, optimizer state and buffers that the "
        "fullest rank will hold, from their shapes",
    },
    "startup": {
        "import_s": "import of torch",
        "group_s": "process group",
        "data_s": "data",
        "model_s": "model and wrap",
        "compile_s": "torch.compile, in the first iteration; null without",
        "total_s": "from the start of the process to the first iteration",
    },
    "epoch": {
        "epoch": "which, from 0",
        "iterations": "optimizer steps",
        "train_loss": "mean over every sample seen",
        "val_loss": "mean over every test sample",
        "val_accuracy": "share of the test samples, 0 to 1",
        "epoch_time_s": "wall time of the timed iterations, slowest rank",
        "timed_images": "images in epoch_time_s (less than the epoch's by the warm-up)",
        "images_per_s": "timed_images / epoch_time_s",
        "eval_time_s": "wall time of the evaluation, slowest rank",
        "data_wait_s": "of epoch_time_s: waiting for batches, slowest rank",
        "peak_memory_mib": "allocated_memory_mib; on the CPU resident_memory_mib",
        "allocated_memory_mib": "peak of tensors on the device since the start, fullest rank; "
        "null on the CPU",
        "reserved_memory_mib": "peak of memory reserved on the device; null on the CPU",
        "resident_memory_mib": "peak resident set of a process since its start, on the host, "
        "fullest rank",
        "held_memory_mib": "parameters, gradients, optimizer state and buffers, measured on the "
        "tensors after the first step, fullest rank",
        "lr": "learning rate of the last step",
        "begun_at": "samples of the epoch that an earlier attempt trained on",
    },
    "breakdown": {  # seconds of one iteration; the first four are means over the ranks
        "compute_s": "forward, backward and the optimizer's step",
        "communication_s": "exposed: nothing but waiting for the other ranks or their data",
        "data_wait_s": "waiting for a batch",
        "other_s": "the rest of the iteration",
        "iteration_s": "wall time of the slowest rank",
        "useful_max_s": "compute and other of the rank with the most of both",
        "busy_max_s": "compute, other and data wait of the rank with the most of all three",
        "iterations": "over which these are means: the middle half by time of those measured",
    },
    "checkpoint": {
        "action": "saved, loaded, rejected",
        "iteration": "optimizer steps that it holds",
        "epoch": "loaded: the epoch that goes on or begins",
        "bytes": "size",
        "time_s": "duration",
    },
    "comm": {  # of the communication benchmark: one operation at one size
        "operation": "all_reduce, all_gather, reduce_scatter, broadcast, all_to_all or sendrecv",
        "scope": "all: every rank; intra_node, inter_node: two ranks of one node, of two nodes",
        "ranks": "ranks that take part",
        "nodes": "nodes that they are on",
        "bytes": "size, as nccl-tests count it: of all_gather the output, else a rank's buffer",
        "iterations": "timed iterations",
        "time_s": "median over the iterations, of the slowest rank in each",
        "time_low_s": "the fastest iteration",
        "time_high_s": "the slowest iteration",
        "algorithm_gb_per_s": "bytes / time_s, in 10^9 bytes a second",
        "bus_gb_per_s": "algorithm_gb_per_s x 2(n-1)/n for all_reduce, (n-1)/n for all_gather, "
        "reduce_scatter and all_to_all, 1 for broadcast and sendrecv",
        "correct": "the result was checked and is right on every rank",
    },
    "message": {"level": "info, warning, error", "text": "what the report must show"},
    "run_end": {
        "status": "ok, failed, preempted",
        "reason": "why, when not ok",
        "total_time_s": "from the start of the process",
        "val_loss": "final",
        "val_accuracy": "final",
    },
}

Record = dict[str, Any]


def finite(value: Any) -> Any:
    """The value with every NaN and infinity as None, which JSON writes as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def encode(record: Record) -> str:
    """The record as one JSON object with its checksum; no newline and never the tag inside."""
    text = json.dumps(finite(record), separators=(",", ":"), allow_nan=False)
    text = text.replace(TAG, "[METRIC\\u005d")
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}'


def _line_bytes(record: Record) -> int:
    return len(TAG) + 1 + len(encode(record)) + 1


def _pieces(value: Any, room: int) -> list[Any]:
    """Split one field's value into pieces that encode to at most room bytes each."""
    if isinstance(value, dict):
        pieces: list[Any] = [{}]
        for key, inner in value.items():
            for part in _pieces(inner, room - len(json.dumps(key)) - 8):
                if len(json.dumps({**pieces[-1], key: part})) > room:
                    pieces.append({})
                pieces[-1][key] = part
        return pieces
    if isinstance(value, str) and len(json.dumps(value)) > room:
        kept = value
        while len(json.dumps(kept)) > room - 12:
            kept = kept[: int(len(kept) * 0.9)]
        return [f"{kept} [cut]"]
    return [value]


def split(head: Record, fields: Record) -> list[Record]:
    """Split fields into records whose lines stay within MAX_LINE_BYTES.

    More than one record have the fields part and parts; merge_parts joins them. A text too long for
    one line is truncated and marked.
    """
    room = MAX_LINE_BYTES - _line_bytes({**head, "part": 100, "parts": 100}) - 24
    bodies: list[Record] = [{}]
    for key, value in fields.items():
        for piece in _pieces(finite(value), room - len(key) - 8):
            if key in bodies[-1] or len(json.dumps({**bodies[-1], key: piece})) > room:
                bodies.append({})
            bodies[-1][key] = piece
    if len(bodies) == 1:
        return [{**head, **bodies[0]}]
    parts = {"parts": len(bodies)}
    return [{**head, "part": i, **parts, **body} for i, body in enumerate(bodies)]


class MetricWriter:
    """Writes the records of one attempt: to its metrics file, and a copy to the log."""

    def __init__(
        self, *, study: str, run_id: str, attempt: int, rank: int, path: Path, log: TextIO
    ) -> None:
        self._common = {"study": study, "run_id": run_id, "attempt": attempt, "rank": rank}
        self._log = log
        self._seq = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered and O_APPEND: one write per record, so that a kill cannot tear one.
        self._file = path.open("ab", buffering=0)

    def write(self, kind: str, **fields: Any) -> None:
        """Write one record of a kind in KINDS (several lines where one would be too long)."""
        assert kind in KINDS, kind
        assert fields.keys() <= KINDS[kind].keys(), fields.keys() - KINDS[kind].keys()
        head = {"v": SCHEMA_VERSION, "kind": kind, **self._common, "seq": 10**6, "t": time.time()}
        for record in split(head, fields):
            record["seq"] = self._seq
            self._seq += 1
            text = encode(record)
            self._file.write(text.encode() + b"\n")
            self._log.write(f"{TAG} {text}\n")
            self._log.flush()

    def close(self) -> None:
        """Close the attempt's file."""
        self._file.close()
