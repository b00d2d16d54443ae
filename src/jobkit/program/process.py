"""What a process knows of itself: its rank, its process group, its GPU; without importing torch."""

import contextlib
import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def distributed() -> Any:
    """torch.distributed, where the program has initialised its process group; else None."""
    dist = sys.modules.get("torch.distributed")
    ready = getattr(dist, "is_initialized", None)
    return dist if ready and ready() else None


def place(environment: Mapping[str, str]) -> tuple[int, int, int | None]:
    """Rank, world size, and the size of the process group, where the program has one.

    Without one by the environment, now or as given.
    """
    if dist := distributed():
        return dist.get_rank(), dist.get_world_size(), dist.get_world_size()
    env = {**environment, **os.environ}
    rank = env.get("RANK") or env.get("SLURM_PROCID") or 0
    return int(rank), int(env.get("WORLD_SIZE") or env.get("SLURM_NTASKS") or 1), None


def local_rank(environment: Mapping[str, str], rank: int) -> int:
    """The rank within its node; where nothing says it, the rank itself."""
    return int(environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or rank)


def host_name(environment: Mapping[str, str]) -> str:
    # On a Slurm of several nodes on one machine only the first name tells them apart.
    return environment.get("SLURMD_NODENAME") or os.uname().nodename


on_cpu = False  # the program looked at the GPUs, and computes on the CPU


def cuda_in_use() -> Any:
    """torch.cuda, if the program uses a GPU; else None."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda and cuda.is_initialized() and not on_cpu else None


def machine() -> dict[str, Any]:
    """The device that is computed on, the threads of a process, and the versions."""
    torch, cuda = sys.modules.get("torch"), cuda_in_use()
    versions = {"python": platform.python_version()}
    if torch:
        versions["torch"] = str(torch.__version__)
    return {
        "device": cuda.get_device_name() if cuda else None,
        "device_type": "cuda" if cuda else "cpu",
        "threads": torch.get_num_threads() if torch else None,
        "versions": versions,
    }


def synchronised_s() -> float:
    """The time in seconds, the GPU's work done; it may not be waited for while a graph is made."""
    cuda = cuda_in_use()
    if cuda and not cuda.is_current_stream_capturing():
        cuda.synchronize()
    return time.perf_counter()


def warn(text: str) -> None:
    with contextlib.suppress(Exception):
        print("jobkit meter:", *text.split(), file=sys.__stderr__, flush=True)  # in one line


class Guarded:
    """What a failure ends with one warning: the training is worth more than its measurement."""

    on = True
    ends = "measuring ends"  # what the warning says

    def give_up(self) -> None:
        """Called after the failure."""


def guarded(act: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a Guarded, which returns None once one of its methods has failed."""

    @functools.wraps(act)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.on:
            try:
                return act(self, *args, **kwargs)
            except Exception as error:
                self.on = False
                with contextlib.suppress(Exception):  # its text may be the program's, and fail
                    warn(f"{type(error).__name__}: {error}; {self.ends}")
                with contextlib.suppress(Exception):
                    self.give_up()
        return None

    return call
