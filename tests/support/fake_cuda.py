"""A GPU that is not there, and what would be done on it."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)


class Operations(TorchDispatchMode):
    """Lists the operations inside, and those that have the host wait for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.waits = list[str](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        self.names.append(name)
        if name == "_local_scalar_dense" or self._copies_and_waits(name, args, kwargs):
            self.waits.append(f"{func.__name__}{tuple(args[0].shape)}")
        return func(*args, **kwargs)

    @staticmethod
    def _copies_and_waits(name: str, args: Any, kwargs: Any) -> bool:
        """Whether it copies from pageable memory to the GPU, or back, and waits for that."""
        if name == "_to_copy":
            devices = {args[0].device.type, (kwargs.get("device") or args[0].device).type}
        elif name == "copy_":
            devices = {args[0].device.type, args[1].device.type}
            kwargs = {"non_blocking": len(args) > 2 and args[2], **kwargs}
        else:
            return False
        return len(devices) > 1 and not kwargs.get("non_blocking")
