"""When checkpoints are written, as --checkpoint-every says."""

import re
from dataclasses import dataclass

from jobkit.errors import UsageError

_FORM = re.compile(r"([1-9][0-9]{0,8})|([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Every:
    """After so many iterations, or seconds, or each epoch; never, where all are left out."""

    iterations: int | None = None
    seconds: float | None = None
    epochs: bool = False

    @classmethod
    def of(cls, text: str | None) -> "Every":
        """Read epoch, 200 (iterations), 30s, 10m or 1h. Raises UsageError for anything else."""
        if text is None:
            return cls()
        if text == "epoch":
            return cls(epochs=True)
        match = _FORM.fullmatch(text)
        if match and match[1]:
            return cls(iterations=int(match[1]))
        if match and (seconds := float(match[2]) * _UNIT_S[match[3]]) > 0:
            return cls(seconds=seconds)
        raise UsageError(
            f"checkpoint_every = {text!r}: must be epoch, a number of iterations (200), or a time "
            "(30s, 10m, 1h)"
        )
