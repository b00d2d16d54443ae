"""The rules for an EDF's [annotations]: names, values, and what the network hooks need."""

from collections.abc import Iterator
from typing import Any

from jobkit.errors import nearest
from jobkit.launch.edf.report import EdfReport
from jobkit.launch.edf.rules import TYPES, misplaced

CXI = "com.hooks.cxi.enabled"
NCCL = "com.hooks.aws_ofi_nccl.enabled"
VARIANT = "com.hooks.aws_ofi_nccl.variant"
REMAP = "com.pyxis.pytorch_remap_vars"
SWITCHES = (
    *(CXI, NCCL, REMAP, "com.pyxis.entrypoint_log", "com.hooks.ssh.enabled"),
    *("com.hooks.nvidia_cuda_mps.enabled", "com.hooks.dcgm.enabled", "com.hooks.slurm.enabled"),
)
KNOWN = (
    *(*SWITCHES, VARIANT, "com.hooks.ssh.authorize_ssh_key", "com.hooks.ssh.port"),
    *("com.hooks.netstack.source", "com.hooks.netstack.version", "com.hooks.netstack.name"),
)
VARIANTS = ("cuda-dl", "cuda12", "cuda13", "rocm5", "rocm6")


def flat(table: dict[str, Any]) -> dict[str, Any]:
    """Each annotation by its dotted name: com.hooks.x may be tables, dotted keys or one key."""
    return dict(_pairs(table, ""))


def _pairs(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _pairs(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def check_annotations(table: dict[str, Any], report: EdfReport) -> dict[str, Any]:
    """Check each annotation by itself; return all by their dotted names."""
    notes = flat(table)
    for name, value in notes.items():
        key = f"annotations.{name}"
        if name in TYPES:
            report.error(key, misplaced("annotations"))
        elif name not in KNOWN:
            if name.startswith(("com.hooks.", "com.pyxis.")):
                report.error(key, f"unknown annotation{nearest(name, KNOWN)}")
        elif not isinstance(value, str):
            report.error(key, "must be a string, within quotes")
        elif (text := report.expand(value, key)) is not None:
            _check_value(name, text, report)
    return notes


def _check_value(name: str, text: str, report: EdfReport) -> None:
    key = f"annotations.{name}"
    if name in SWITCHES and text not in ("true", "false"):
        report.error(key, f'\'{text}\' must be "true" or "false"')
    elif name == VARIANT and text not in VARIANTS:  # sites may have more
        known = ", ".join(VARIANTS)
        report.warn(key, f"unknown variant '{text}'{nearest(text, VARIANTS)} (known: {known})")
    elif name == REMAP and text == "true":
        report.error(key, "sets RANK and LOCAL_RANK, which jobkit takes from Slurm: remove it")


def check_hooks(notes: dict[str, Any], report: EdfReport) -> None:
    """Check that NCCL's network hook is complete; without it NCCL uses TCP, many times slower."""
    if notes.get(NCCL) == "true" and notes.get(CXI) != "true":
        add = report.error if CXI in notes else report.warn  # some versions imply it
        add(f"annotations.{NCCL}", f'needs {CXI} = "true"')
    if VARIANT in notes and notes.get(NCCL) != "true":
        add = report.warn if NCCL in notes else report.error  # "false" may be meant
        add(f"annotations.{VARIANT}", f'has no effect without {NCCL} = "true": NCCL uses TCP')
