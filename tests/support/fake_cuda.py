"""GPUs that are not there: fake CUDA tensors, and torch.cuda's functions mocked.

Fake tensors have shapes, types and a device, and no data. Every operation on them is listed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
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


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors made inside are fake, and may be on a GPU; a backward pass computes nothing."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


class FakeCuda:
    """GPUs of one process, by their UUIDs. chosen: the devices that set_device was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
        self.uuids, self.chosen = list(uuids), []
        self._patch = monkeypatch
        self.mock("device_count", lambda: len(self.uuids))
        self.mock("is_available", lambda: bool(self.uuids))
        self.mock("set_device", self.chosen.append)
        self.mock("get_device_properties", self._properties)
        self.mock("get_device_name", lambda _=None: "Fake")

    def mock(self, name: str, value: object) -> None:
        """Replace a function of torch.cuda."""
        self._patch.setattr(torch.cuda, name, value)

    def _properties(self, device: int | torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=self.uuids[getattr(device, "index", device) or 0], name="Fake")
