"""The checks of the exercises: a right, an empty and wrong solutions, each run by two ranks."""

import re
from pathlib import Path

import pytest

import checking
from ranks import RankError
from support.place import ROOT

pytestmark = pytest.mark.usefixtures("fork_server")
# What solves an exercise and is not in its skeleton: no check may name it.
SOLVING = ("set_epoch", "DistributedSampler", "barrier", "zero_grad", "no_grad", "all_reduce",
           "destroy_process_group", "init_process_group", "model.train()")  # fmt: skip
# A wrong solution is the right one with one mistake.
RIGHT = {
    "2.1": """\
import os
import torch
import torch.distributed as dist

def setup():
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device=device)
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=world_size)
    return rank, local_rank, world_size, device

def cleanup():
    dist.destroy_process_group()
""",
    "3.1": """\
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def get_data(download, rank):
    if rank == 0:
        download()
    dist.barrier()

def get_loader(dataset, batch_size, rank, world_size):
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)

def start_epoch(loader, epoch):
    loader.sampler.set_epoch(epoch)
""",
    "4.1": """\
import torch
from torch.nn.parallel import DistributedDataParallel

def get_ddp_model(model, device):
    devices = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model.to(device), device_ids=devices)
""",
    "5.1": """\
def main(tools, strategy, train=None):
    if strategy not in ("ddp", "fsdp"):
        raise ValueError(strategy)
    rank, local_rank, world_size, device = tools.setup()
    loader = tools.data(rank, world_size)
    model = tools.model()
    model = tools.ddp(model, device) if strategy == "ddp" else tools.fsdp(model, device)
    optimizer = tools.optimizer(model)
    if train is not None:
        train(model, loader, optimizer, device)
    tools.cleanup()
""",
    "6.1": """\
import torch
import torch.distributed as dist
import torch.nn.functional as F

def train_epoch(model, loader, optimizer, device):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()

def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            logits = model(x.to(device))
            sums[0] += F.cross_entropy(logits, y, reduction="sum")
            sums[1] += (logits.argmax(1) == y).sum()
            sums[2] += len(y)
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()
""",
}
# What is wrong: in the right solution old becomes new; what the check says holds the last text.
WRONG = (
    ("2.1", "rank of the node", 'environ["RANK"]', 'environ["LOCAL_RANK"]',
          ": joins as rank 0 of 2, but is 1 of 2"),
    ("2.1", "GPU of the rank", '"cuda", local_rank', '"cuda", rank',
          "cuda:0 on rank 0, cuda:1 on rank 1; each node has a GPU 0 and no other"),
    ("3.1", "no sampler", "num_replicas=world_size, rank=rank", "num_replicas=1, rank=0",
          "no sample is seen by both ranks: 24 of 24 samples are"),
    ("3.1", "no waiting", "dist.barrier()", "pass",
          "files after get_data(): complete: True on rank 0, False on rank 1"),
    ("4.1", "as it was", "return DistributedDataParallel(", "return (lambda m, **_: m)(",
          "both ranks begin with the same weights: they differ by"),
    ("4.1", "unwrapped", "device_ids=devices)", "device_ids=devices).module",
          "both ranks have the same gradients: they differ by up to"),
    ("5.1", "always ddp", 'if strategy == "ddp" else', 'if True else',
          "fsdp: train() gets a model of that strategy: DistributedDataParallel on every rank"),
    ("5.1", "dry run does nothing", "    rank, local_rank", ("    if train is None: return\n"
          "    rank, local_rank"), "a dry run does everything but the training: not setup, data, "),
    ("6.1", "gradients add up", "optimizer.zero_grad()", "pass",
          "the norms of the gradients were"),
    ("6.1", "mean of means", "    dist.all_reduce(sums)\n", ("    sums = sums / sums[2]\n"
          "    dist.all_reduce(sums)\n"), "the loss is that of all 20 samples (16 and 4): "),
)  # fmt: skip


def mistakes(number: str, source: str, folder: Path) -> list[str]:
    path = folder / "mine.py"
    path.write_text(source)
    return [text for ok, text in checking.check(number, str(path)) if not ok]


@pytest.mark.parametrize("number", RIGHT)
def test_a_right_solution_passes_and_a_skeleton_does_not(number: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RIGHT[number])
    every = checking.check(number, str(path))
    assert len(every) >= 4 and [text for ok, text in every if not ok] == []
    ((ok, text),) = checking.check(number, str(ROOT / "docs/exercises/skeletons" / f"{number}.txt"))
    assert not ok and re.search(r"\w+\(\) is not completed, line \d+", text)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong[0]} {wrong[1]}")
def test_a_mistake_is_named_and_not_solved(wrong: tuple[str, ...], tmp_path: Path) -> None:
    number, _, old, new, text = wrong
    assert old in RIGHT[number]
    said = "\n".join(mistakes(number, RIGHT[number].replace(old, new), tmp_path))
    assert text in said
    assert [word for word in SOLVING if word in said] == []


def test_a_file_that_cannot_be_run_is_one_remark(tmp_path: Path) -> None:
    for source, said in (
        ("def main(tools, strategy, train=None:\n", "SyntaxError"),
        ("main = 3", "the file has no function main()"),
        ("exit(3)", "SystemExit: 3"),
        ("import os\nos._exit(0)", "ended without a result"),
    ):
        (text,) = mistakes("5.1", source, tmp_path)
        assert said in text


def test_what_ended_a_rank_is_said_in_words(monkeypatch) -> None:
    def fail(*_args, **_words) -> None:
        raise RankError(1, "RuntimeError: [pair.cc:1] Timed out waiting 20000ms")

    monkeypatch.setattr(checking, "on_ranks", fail)
    ((ok, text),) = checking.check("3.1", "mine.py")
    assert not ok and "waited for the other rank, which" in text


def test_the_script_takes_a_number_and_a_file(tmp_path: Path, capsys) -> None:
    skeleton = str(ROOT / "docs/exercises/skeletons/5.1.txt")
    assert checking.main("5.1", skeleton) == 4
    assert "WRONG main() is not completed" in capsys.readouterr().out
    for words in ([], ["5.1"], ["1.1", skeleton], ["5.1", str(tmp_path / "none.py")]):
        assert checking.main(*words) == 2
        (line,) = capsys.readouterr().out.splitlines()
        assert "one of 2.1, 3.1, 4.1, 5.1, 6.1" in line
