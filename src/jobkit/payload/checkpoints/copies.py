"""Copies of a state in the CPU's memory, so that training continues while they are written."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from jobkit.payload.checkpoints import state
from jobkit.payload.sharded import is_sharded


class Copier:
    """Copies the tensors of each checkpoint; on a GPU into pinned memory that it uses again.

    A copy to pageable memory makes the host wait for each tensor; these are all issued, and then
    waited for once (torch.distributed.checkpoint.staging). Nobody may read the last copies when the
    next ones are made.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device_type = device.type if device is not None else "cpu"
        self._stager: Any = None

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors on the CPU, by name."""
        moved = {name: t for name, t in tensors.items() if self._staged(t)}
        found = state.copied({name: t for name, t in tensors.items() if name not in moved})
        return found | (self._stage(moved) if moved else {})

    def _staged(self, tensor: Tensor) -> bool:
        return self._device_type == "cuda" and tensor.device.type == "cuda"

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        try:
            if self._stager is None:
                from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

                self._stager = DefaultStager(
                    StagingOptions(use_shared_memory=False, use_async_staging=False)
                )
            staged: dict[str, Tensor] = self._stager.stage(tensors)
        except RuntimeError as error:  # no more memory may be pinned, say
            if isinstance(error, torch.OutOfMemoryError):
                raise
            first = str(error).strip().split("\n")[0][:200]
            warnings.warn(f"copies of the state are not pinned: {first}", stacklevel=2)
            self._device_type = "cpu"
            return state.copied(tensors)
        return staged


def once(
    tensors: dict[str, Tensor], everyone: Callable[[Any], list[Any]], rank: int
) -> dict[str, Tensor]:
    """The tensors that this rank gives to a checkpoint: each replicated one is one rank's.

    Otherwise every rank copied a whole replica of which the checkpoint takes one. They are shared
    out by bytes. Sharded tensors stay where they are. Every rank calls; everyone: gives every
    rank's value to every rank.
    """
    whole = {name: t.numel() * t.element_size() for name, t in tensors.items() if not is_sharded(t)}
    held: list[dict[str, int]] = everyone(whole)
    given = [0] * len(held)  # bytes, by rank
    mine = set(tensors) - set(whole)
    for name in sorted({name for part in held for name in part}):
        owner = min((r for r, part in enumerate(held) if name in part), key=lambda r: given[r])
        given[owner] += held[owner][name]
        if owner == rank:
            mine.add(name)
    return {name: t for name, t in tensors.items() if name in mine}
