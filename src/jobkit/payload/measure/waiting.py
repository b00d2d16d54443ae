"""A second measure of exposed communication, without a replica: how long the passes wait for it.

DDP: from the last gradient of a backward pass to its end, where all that is left is its last
buckets; on a GPU between two events of the stream that computes. FSDP2 on the CPU: the time inside
its collectives. Both are read in the same iterations as the difference to the replica.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jobkit.payload.clock import Stopwatch
from jobkit.payload.sharded import is_fsdp

WAITED = "waited"  # the stopwatch's part
_SYNC = "_sync_buffers"  # of DDP: a broadcast before the forward pass
_COMMS = ("_all_gather_comm", "_reduce_scatter_comm")  # of FSDP2's groups of parameters
Undo = Callable[[], None]


class _Timed:
    """Something of torch's, whose calls count for the part."""

    def __init__(self, inner: Any, watch: Stopwatch) -> None:
        self._inner, self._watch = inner, watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch.part(WAITED):
            return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def time_waits(model: nn.Module, watch: Stopwatch, replicas: int = 1) -> list[Undo] | None:
    """Have the stopwatch measure the waits of a wrapped model; return how to end that.

    None where there is no such measure: another wrapper, FSDP2 on a GPU or with several replicas
    (their all-reduce is out of reach), or a torch that has these parts elsewhere.
    """
    if isinstance(model, DistributedDataParallel):
        trained = [p for p in model.parameters() if p.requires_grad]
        hooks = [
            p.register_post_accumulate_grad_hook(lambda _: watch.mark(WAITED)) for p in trained
        ]
        ends: list[Undo] = [hook.remove for hook in hooks]
        if hasattr(model, _SYNC):
            object.__setattr__(model, _SYNC, _Timed(getattr(model, _SYNC), watch))
            ends.append(lambda: object.__delattr__(model, _SYNC))
        return ends
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    if is_fsdp(model) and on_cpu and replicas == 1:
        return _of_fsdp(model, watch)
    return None


def _of_fsdp(model: nn.Module, watch: Stopwatch) -> list[Undo] | None:
    ends: list[Undo] = []
    for module in filter(is_fsdp, model.modules()):
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        group = getattr(state, "_fsdp_param_group", None)
        if group is None:  # a module without parameters of its own
            continue
        for name in _COMMS:
            inner = getattr(group, name, None)
            if inner is None:
                stop_timing(ends)
                return None
            setattr(group, name, _Timed(inner, watch))
            ends.append(lambda g=group, n=name, i=inner: setattr(g, n, i))  # type: ignore[misc]
    return ends


def stop_timing(undo: list[Undo] | None) -> None:
    """Undo what time_waits did."""
    for one in undo or ():
        one()
