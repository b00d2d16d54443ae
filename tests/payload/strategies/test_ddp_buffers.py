"""On GPUs DDP broadcasts no buffers in its forward pass; an evaluation finds the ranks' mean."""

import pytest
import torch
from torch import nn

from jobkit.payload.place import RankEnv
from jobkit.payload.strategies import ddp
from jobkit.spec.runspec import RunSpec
from support.fake_cuda import GPU


@pytest.mark.parametrize(("device", "broadcast"), [(GPU, False), (torch.device("cpu"), True)])
def test_buffers_are_broadcast_in_the_forward_pass_on_cpus_only(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, broadcast: bool
) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda model, **given: seen.update(given))
    monkeypatch.setattr(ddp.DDP, "placed", lambda self, model: model)
    ddp.DDP(RunSpec(), RankEnv(), device)._wrapped(nn.Identity(), None)
    assert seen.get(ddp._SYNC_BUFFERS, True) is broadcast
