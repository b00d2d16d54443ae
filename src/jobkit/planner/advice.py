"""The advice as text and as an answer for programs."""

import math
from collections.abc import Iterable

from jobkit.planner.choice import Option, Question, command_line, reasons
from jobkit.planner.memory_table import head, row
from jobkit.planner.options import amount, text_table
from jobkit.planner.traffic import duration
from jobkit.units import GIB


def answer(
    question: Question, options: list[Option], refused: dict[str, str], taken: Option | None
) -> dict[str, object]:
    """The advice for a program."""
    return {
        "strategy": taken.label if taken else None,
        "command": command_line(taken.footprint.spec, question.subject) if taken else None,
        "why": reasons(taken, options) if taken else [],
        "usable_mib": question.usable / 2**20,
        "options": [
            {
                **row(o.footprint),
                "fits": o.fits,
                "communication_s": None if math.isnan(o.seconds) else o.seconds,
                "waits": o.waits,
                "idle_share": o.idle,
            }
            for o in options
        ],
        "refused": refused,
    }


def text(
    question: Question, options: list[Option], refused: dict[str, str], taken: Option | None
) -> list[str]:
    """The advice for a reader."""
    lines = [*head(question.base, question.subject), *_table(options, question, taken)]
    lines += [f"   {label}: not applicable: {why}" for label, why in refused.items()]
    lines += [
        "   communication: ring estimate at these bandwidths for one optimizer step; part of it is",
        "   overlapped with computation. waits: how often a GPU waits for others in it, at most.",
        "   idle: part of a step that a GPU waits for other stages.",
    ]
    if question.subject.parameters is not None:
        lines.append(
            "   not included, as only the size is known: activations, and what full shard gathers"
        )
    lines.append("")
    if taken is None:
        least = min(options, key=lambda o: o.footprint.total)
        return [
            *lines,
            f"nothing fits into {question.usable / GIB:.3g} GiB. The smallest is {least.label} "
            f"with {least.footprint.total / GIB:.3g} GiB: ask again with more GPUs"
            + (
                ", a smaller batch (--batch-size-per-rank), --accumulate or "
                "--activation-checkpointing"
                if question.subject.parameters is None
                else ""
            ),
        ]
    used = taken.footprint.total / question.usable
    return [
        *lines,
        f"recommended: {taken.label}",
        *_points(reasons(taken, options)),
        *_points([f"it takes {used:.0%} of the memory that may be used on each GPU"]),
        "run:",
        f"  {command_line(taken.footprint.spec, question.subject)}",
    ]


def _points(lines: Iterable[str]) -> list[str]:
    return [f"  - {line}" for line in lines]


def _table(options: list[Option], question: Question, taken: Option | None) -> list[str]:
    """The costs of each strategy, one line each; a star at the recommended one."""
    gib = f"GiB of {question.usable / GIB:.3g}"
    rows = [["", "strategy", gib, "fits", "communication", "waits", "idle"]]
    for o in options:
        used = amount(o.footprint.total, GIB)
        star = "*" if o is taken else ""
        rows.append(
            [
                *(star, o.label, used, "yes" if o.fits else "no", duration(o.seconds)),
                *("-" if o.waits is None else str(o.waits), f"{o.idle:.0%}"),
            ]
        )
    return ["", *text_table(rows), ""]
