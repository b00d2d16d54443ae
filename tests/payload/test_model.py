"""The models, the user's own, and the strategies around them, in one process."""

from pathlib import Path

import pytest
import torch
from torch import nn

from jobkit.errors import UsageError
from jobkit.payload import warnings
from jobkit.payload.model import CNN, build_model
from jobkit.payload.place import RankEnv, read_rank_env
from jobkit.spec.runspec import RunSpec

OWN = """
import torch
from torch import nn

class Fine(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(3072, num_classes)
    def forward(self, x):
        return self.layer(x.flatten(1))

def ten():
    return Fine(10)

class Wrong(Fine):
    def __init__(self):
        super().__init__(7)

class Crash(Fine):
    def forward(self, x):
        return self.layer(x)

def nothing():
    return None

def greedy(num_classes, depth, width=2):
    return Fine(num_classes)

number = 3
"""


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("count", [1, 7])
def test_the_cnn_takes_any_batch_and_width(width: int, count: int) -> None:
    model = CNN(10, width)
    assert model(torch.zeros(count, 3, 32, 32)).shape == (count, 10)
    assert model.hidden.weight.shape == (256 * width, 2048 * width)


@pytest.mark.parametrize("shape", [(2, 3, 28, 28), (2, 1, 32, 32)])
def test_the_cnn_refuses_other_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        CNN(10)(torch.zeros(shape))


@pytest.mark.parametrize(
    "name", ["cnn", "fast_cnn", "mlp", "resnet18", "own_models:Fine", "own_models:ten"]
)
def test_a_model_is_the_same_for_the_same_seed_and_other_for_another(name: str) -> None:
    def weights(spec: RunSpec) -> torch.Tensor:
        return torch.cat([p.flatten() for p in build_model(spec, 10).parameters()])

    first = weights(RunSpec(model=name, seed=1))
    assert torch.equal(first, weights(RunSpec(model=name, seed=1)))
    assert torch.equal(first, weights(RunSpec(model=name, repeat=1)))
    assert not torch.equal(first, weights(RunSpec(model=name, seed=2)))


def test_resnet18_keeps_small_images_large() -> None:
    model = build_model(RunSpec(model="resnet18"), 10).eval()
    assert isinstance(model.maxpool, nn.Identity)
    assert model.conv1(torch.zeros(1, 3, 32, 32)).shape == (1, 64, 32, 32)
    with pytest.raises(UsageError, match="resnet18 has one width"):
        build_model(RunSpec(model="resnet18", width=2), 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("own_models:absent", "has no attribute 'absent'"),
        ("own_models:number", "number is not a function or class"),
        ("own_models:greedy", "needs depth, and is called with num_classes alone"),
        ("own_models:nothing", "made a NoneType, not a torch.nn.Module"),
        ("own_models:Wrong", "gives (2, 7) for 2 images, not (2, 10)"),
        ("own_models:Crash", "fails on (2, 3, 32, 32) images: "),
    ],
)
def test_a_model_of_the_users_that_cannot_be_used_says_why(name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_model(RunSpec(model=name), 10)
    assert str(caught.value).startswith(f"--model {name}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "device", "lines"),
    [
        (RunSpec(), "cpu", []),
        (RunSpec(strategy="fsdp", ddp_bucket_mib=3.0), "cpu", ["--ddp-bucket-mib has no effect"]),
        (RunSpec(fsdp_cpu_offload=True), "cuda", ["--fsdp-cpu-offload has no effect: it needs"]),
        (
            RunSpec(strategy="fsdp", fsdp_cpu_offload=True),
            "cpu",
            ["--fsdp-cpu-offload has no effect on the CPU"],
        ),
        (RunSpec(strategy="fsdp", fsdp_cpu_offload=True), "cuda", []),
        (
            RunSpec(optimizer="adamw", momentum=0.5, nesterov=False),
            "cpu",
            ["--momentum has no effect", "--nesterov has no effect"],
        ),
        (RunSpec(lr_base_batch_size=64), "cpu", ["--lr-base-batch-size has no effect"]),
        (RunSpec(lr_base_batch_size=64, lr_scaling="sqrt"), "cpu", []),
        (RunSpec(model="own_models:ten", width=2), "cpu", ["--width has no effect"]),
        (RunSpec(keep_memory=False), "cuda", ["--no-keep-memory has no effect on a GPU"]),
        (
            RunSpec(strategy="fsdp", fsdp_reduce_fp32=False, precision="fp32"),
            "cpu",
            ["--fsdp-reduce-fp32 has no effect: it needs a lower precision"],
        ),
    ],
)
def test_a_setting_without_effect_is_told(spec: RunSpec, device: str, lines: list[str]) -> None:
    said = warnings.without_effect(spec, device)
    assert len(said) == len(lines)
    assert all(any(s.startswith(line) for s in said) for line in lines)


def test_batches_and_ranks_that_do_not_fit_are_told() -> None:
    cpu, many = torch.device("cpu"), RankEnv(world_size=10_000, local_world_size=10_000)
    (batch,) = warnings.of_size(RunSpec(), RankEnv(), cpu, 100)
    assert "global batch of 512 is more than the 100 training samples" in batch
    (ranks,) = warnings.of_size(RunSpec(), many, cpu, 1000)
    assert "10000 ranks share" in ranks


def test_a_place_comes_from_torchrun_else_slurm_else_one_process() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_env({}) == RankEnv()
    place = read_rank_env({**torchrun, "MASTER_ADDR": "h", "MASTER_PORT": "5", "SLURM_PROCID": "0"})
    assert (place.rank, place.nodes, place.master_addr, place.master_port) == (3, 2, "h", 5)
    with pytest.raises(UsageError, match="do not fill nodes of 3"):
        read_rank_env({**torchrun, "LOCAL_WORLD_SIZE": "3"})
