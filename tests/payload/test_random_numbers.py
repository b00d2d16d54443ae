"""Each rank draws numbers of its own; a run resumed at another size draws new ones."""

from collections.abc import Iterator

import pytest
import torch

from jobkit.payload import random_numbers
from support.fake_cuda import FakeCuda

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with torch.random.fork_rng([]):
        yield


def drawn(rank: int, seed: int = 0, iteration: int = 0) -> tuple[float, ...]:
    """What a rank draws first, after all have seeded alike."""
    torch.manual_seed(seed)
    random_numbers.begin(seed, rank, iteration=iteration)
    return tuple(torch.rand(4).tolist())


def test_rank_0_draws_as_a_run_on_one_rank_does() -> None:
    found = drawn(0, seed=5)
    torch.manual_seed(5)
    assert found == tuple(torch.rand(4).tolist())


def test_no_two_ranks_repeats_or_resumed_runs_draw_the_same() -> None:
    """A sum of seed and rank would be the same for two of these."""
    found = [drawn(r, seed, at) for r in range(4) for seed in range(3) for at in (0, 8, 16)]
    assert len(set(found)) == len(found)
    assert drawn(3, 1, 8) == drawn(3, 1, 8)


def test_each_gpu_of_one_process_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.DataParallel's copies of the model draw on several GPUs, which are seeded alike."""
    cuda, seeds, at = FakeCuda(monkeypatch, *"abc"), dict[int, int](), list[int]()

    class Device:
        def __init__(self, index: int) -> None:
            at.append(index)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    cuda.mock("device", Device)
    cuda.mock("manual_seed", lambda seed: seeds.update({at[-1]: seed}))
    random_numbers.begin(0, 0, gpus=3)
    assert list(seeds) == [1, 2]  # the first has the process's
    assert seeds[1] != seeds[2]


def test_a_checkpoint_has_the_state_of_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {0: torch.tensor([1]), 1: torch.tensor([2])}

    def index(device: torch.device | int) -> int:
        return device.index if isinstance(device, torch.device) else device

    cuda = FakeCuda(monkeypatch, *"ab")
    cuda.mock("get_rng_state", lambda device: states[index(device)])
    cuda.mock("set_rng_state", lambda state, device: states.update({index(device): state}))
    kept = random_numbers.state(GPU, 2)
    states.clear()
    drawn_next = torch.rand(3)
    random_numbers.take(kept, GPU, 2)
    assert (states[0].item(), states[1].item()) == (1, 2)
    assert torch.equal(torch.rand(3), drawn_next)
    assert list(random_numbers.state(CPU, 1)) == ["random.cpu"]
