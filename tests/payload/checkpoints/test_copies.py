"""What a rank copies for a checkpoint in the background: its part, with one wait, to one place."""

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import staging

from jobkit.payload.checkpoints.copies import Copier, once

GPU = torch.device("cuda", 0)


def state(value: float) -> dict[str, Tensor]:
    return {"model.w": torch.full((3, 4), value), "model.b": torch.full((4,), -value)}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tensors of the CPU are taken for those of a GPU; each wait for the GPU is noted."""
    found: list[str] = []
    monkeypatch.setattr(Copier, "_staged", lambda self, _: self._device_type == "cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: found.append("all"))
    return found


def test_all_copies_are_waited_for_once_and_use_the_same_memory_again(waits: list[str]) -> None:
    copier, live = Copier(GPU), state(1.0)
    first = copier.copies(live)
    places = {name: t.data_ptr() for name, t in first.items()}
    assert waits == ["all"]
    for tensor in live.values():
        tensor.mul_(3)  # the training goes on
    assert all(torch.equal(first[name], t) for name, t in state(1.0).items())
    second = copier.copies(live)
    assert waits == ["all", "all"]
    assert all(torch.equal(second[name], t) for name, t in state(3.0).items())
    assert {name: t.data_ptr() for name, t in second.items()} == places


def test_pinned_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch, waits: list[str]) -> None:
    asked: list[staging.StagingOptions] = []

    class Stager:
        def __init__(self, options: staging.StagingOptions) -> None:
            asked.append(options)

        def stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return tensors

    monkeypatch.setattr(staging, "DefaultStager", Stager)
    Copier(GPU).copies(state(1.0))
    (options,) = asked
    assert (options.use_pinned_memory, options.use_non_blocking_copy) == (True, True)
    assert (options.use_async_staging, options.use_shared_memory) == (False, False)


def test_where_no_memory_can_be_pinned_copies_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch, waits: list[str]
) -> None:
    def stage(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: part or all of the requested memory range is in use")

    monkeypatch.setattr(staging.DefaultStager, "stage", stage)
    copier, live = Copier(GPU), state(2.0)
    with pytest.warns(UserWarning, match="not pinned: CUDA error"):
        found = copier.copies(live)
    live["model.w"].zero_()
    assert torch.equal(found["model.w"], state(2.0)["model.w"])
    assert torch.equal(copier.copies(live)["model.w"], live["model.w"])  # without another try


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_on_the_cpu_copies_are_plain(device: torch.device | None) -> None:
    live = state(1.0)
    found = Copier(device).copies(live)
    assert all(torch.equal(found[name], t) for name, t in live.items())
    assert {t.data_ptr() for t in found.values()}.isdisjoint(t.data_ptr() for t in live.values())


def test_each_replicated_tensor_is_given_by_one_rank() -> None:
    """Three ranks: two with a replica each, as pipelines beside each other, and one without."""
    held = [
        {"a": torch.zeros(8), "b": torch.zeros(8), "c": torch.zeros(4), "rank.0.x": torch.zeros(1)},
        {"a": torch.zeros(8), "b": torch.zeros(8), "c": torch.zeros(4), "rank.1.x": torch.zeros(1)},
        {"d": torch.zeros(2), "rank.2.x": torch.zeros(1)},
    ]
    sizes = [{n: t.numel() * t.element_size() for n, t in part.items()} for part in held]

    def everyone(own: dict[str, int]) -> list[dict[str, int]]:
        assert own in sizes
        return sizes

    given = [sorted(once(part, everyone, rank)) for rank, part in enumerate(held)]
    assert given == [["a", "c", "rank.0.x"], ["b", "rank.1.x"], ["d", "rank.2.x"]]
