"""The memory of each strategy as text and as rows."""

from collections.abc import Sequence
from typing import Any

from jobkit.planner.footprints import Footprint, Subject
from jobkit.planner.options import amount, text_table, unit_for
from jobkit.spec.runspec import RunSpec
from jobkit.units import MIB

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "communication", "data")


def sizes(each: Footprint) -> dict[str, int | None]:
    """The parts of a footprint and their sum, in bytes."""
    share = each.share
    kept = (share.parameters, share.gradients, share.optimizer, share.buffers)
    parts = zip(PARTS, (*kept, each.activations, each.communication, each.data), strict=True)
    return {**dict(parts), "total": each.total}


def row(each: Footprint) -> dict[str, Any]:
    """A footprint for programs, in MiB."""
    known = {
        f"{name}_mib": None if size is None else size / MIB for name, size in sizes(each).items()
    }
    return {"strategy": each.label, **known, "offloaded_to_host_mib": each.host / MIB}


def head(base: RunSpec, subject: Subject) -> list[str]:
    """What the table is of."""
    count = sum(p.numel() for p in subject.tensors(base)[0])
    name = "a model" if subject.parameters else base.model
    wide = f", width {base.width}" if base.width > 1 else ""
    each = -(-base.steps_batch_size // base.world_size)
    batch = "" if subject.parameters else f", {each} images per step on each"
    precision = base.precision if base.precision != "auto" else "fp32"  # takes the most memory
    ranks = f"{base.world_size} GPU{'s' * (base.world_size > 1)}"
    nodes = f" on {base.nodes} nodes" if base.nodes > 1 else ""
    of = f"{count:,} parameters, {base.optimizer}, {precision}"
    return [f"{name}{wide}: {of}, {ranks}{nodes}{batch}"]


def table(found: Sequence[Footprint], asked: str) -> list[str]:
    """The footprints for a reader, one line each; a star at the one asked for."""
    unit, size = unit_for(max(each.total for each in found))
    rows = [["", f"{unit} (maximum over ranks)", *PARTS, "total"]]
    for each in found:
        numbers = [amount(n, size) for n in sizes(each).values()]
        rows.append(["*" if each.label == asked else "", each.label, *numbers])
    return text_table(rows)


def notes(found: Sequence[Footprint], refused: dict[str, str]) -> list[str]:
    """What the reader must know of the numbers."""
    lines = [
        "",
        "* the requested strategy. 1 GiB = 1024 MiB = 2^30 bytes. Gradients are those just before",
        "  the optimizer's step. Not counted: the CUDA context, NCCL, workspaces of kernels, and",
        "  what the allocator reserves beyond. DDP's buckets are the gradients (unless",
        "  --no-ddp-gradient-as-bucket-view); FSDP gathers blocks, pp and mp receive activations.",
        "  data: the images of the data set (--images), which stay on each GPU, and their crops.",
    ]
    if any(each.activations is None for each in found):
        lines.append("  -: needs a model; of this one only the size is known.")
    if any(each.host for each in found):
        lines.append("  --fsdp-cpu-offload: what fsdp keeps is on the host; total leaves it out.")
    return [*lines, *(f"  {label}: not applicable: {why}" for label, why in refused.items())]
