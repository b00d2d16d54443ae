"""The one rig that plays GPUs: torch.cuda's functions, mocked. Nothing computes on these GPUs."""

from types import SimpleNamespace

import pytest
import torch


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
        index = device.index if isinstance(device, torch.device) else device
        uuid = self.uuids[index or 0]
        if uuid == "broken":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")
        return SimpleNamespace(uuid=uuid, name="Fake", total_memory=2**34)


# A process that has this as sitecustomize.py sees the GPUs that FAKE_GPUS names.
SITE = """
import os, types, torch
uuids = os.environ["FAKE_GPUS"].split()
torch.cuda.device_count = lambda: len(uuids)
torch.cuda.get_device_properties = lambda i: types.SimpleNamespace(uuid=uuids[i], name="Fake")
"""
