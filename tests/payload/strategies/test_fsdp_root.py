"""FSDP's root and last block keep their parameters between the forward and the backward pass."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.fsdp import FSDP
from jobkit.spec.runspec import RunSpec


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("reshard", [True, False])
def test_the_roots_parameters_are_not_gathered_again_at_once(reshard: bool) -> None:
    given = {"fsdp_reshard_after_forward": reshard, "fsdp_group_mib": 0.0}
    spec = RunSpec(strategy="fsdp", model="mlp", **given)
    strategy = FSDP(spec, RankEnv(), torch.device("cpu"))
    strategy.setup(build_model(spec, 10))
    strategy.model(torch.zeros(2, 3, 32, 32)).sum()
    model = strategy.model
    assert isinstance(model, FSDPModule)
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    kept = [g.post_forward_mesh_info is None for s in states[1:] for g in s._fsdp_param_groups]
    assert kept == [not reshard, not reshard, True]  # the last block's are needed at once, too
    assert states[0]._auto_reshard_after_forward is reshard  # torch: then the root's are kept
