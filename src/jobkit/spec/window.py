"""Which iterations and ranks are profiled, as --profile and --profile-ranks say."""

import re
from dataclasses import dataclass

from jobkit.errors import UsageError


@dataclass(frozen=True)
class Window:
    """Optimizer steps from first to last, counted from 1 over the whole training."""

    first: int
    last: int

    @classmethod
    def of(cls, text: str | None) -> "Window | None":
        """Read 20-22, or 20. Raises UsageError for anything else."""
        if text is None:
            return None
        match = re.fullmatch(r"([1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?", text)
        if match and int(match[1]) <= int(match[2] or match[1]):
            return cls(int(match[1]), int(match[2] or match[1]))
        raise UsageError(f"profile = {text!r}: must be iterations, as 20-22, counted from 1")


def profiled_ranks(text: str) -> frozenset[int] | None:
    """Read 0 or 0,3; None for all. Raises UsageError for anything else."""
    if text == "all":
        return None
    if re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        return frozenset(int(word) for word in text.split(","))
    raise UsageError(f"profile_ranks = {text!r}: must be all, or ranks, as 0,3")
