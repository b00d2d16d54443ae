"""Ours beside the plain loop and Lightning.

    python tests/bench/peers.py --rounds 1      rough

The same CNN, optimizer, batch size and number of random images, fp32 and, where the processor has
it, bf16; one rank with all cores as threads, and two ranks that share them. Every run is a process
of its own (ours: the training that run.sh starts), and the ways take turns. Printed are medians
over the rounds, and medians of ours over each peer within a round: images per second, the start of
the process to the first step, and CPU time of the whole run, start included, which says something
on a machine that is not idle, too. The clock of the peers is a hook of torch on optimizer steps.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from throughput import BATCH, LR, precisions, ratio, turns
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from bench import ENV, TWO_RANKS, Figures, report
from jobkit.payload.device import process_age_s
from jobkit.payload.model import CNN

WARM = 2
LIMITS = {"fp32": 1.9, "bf16": 2.2}  # ours over the best peer
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


class Images(Dataset[Any]):
    """Random images as a dataset of files gives them: one PIL image at a time, transformed."""

    def __init__(self, batches: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (BATCH * batches, 32, 32, 3)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(10, shape[:1], generator=generator).tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.images[index].numpy())), self.labels[index]


def sgd(model: Any) -> Any:
    """The optimizer of every way."""
    return torch.optim.SGD(
        model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4
    )


def loader_of(dataset: Any, sampler: Any = None) -> Any:
    """Batches of one rank's share."""
    return DataLoader(dataset, BATCH // WORLD_SIZE, shuffle=sampler is None, sampler=sampler)


def plain(dataset: Any, bf16: bool) -> None:
    """The tutorial's loop; under torchrun with DDP."""
    model, sampler = CNN(10), None
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        sampler = torch.utils.data.DistributedSampler(dataset)
    optimizer = sgd(model)
    for x, y in loader_of(dataset, sampler):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(x)
        cross_entropy(logits.float(), y).backward()
        optimizer.step()


def lightning(dataset: Any, bf16: bool) -> None:
    """A LightningModule and its Trainer, without logger, checkpoints and bars."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = CNN(10)

        def training_step(self, batch: Any, _: int) -> Any:
            return cross_entropy(self.model(batch[0]).float(), batch[1])

        def configure_optimizers(self) -> Any:
            return sgd(self)

    pl.Trainer(
        accelerator="cpu", devices=WORLD_SIZE, strategy="ddp" if WORLD_SIZE > 1 else "auto",
        precision="bf16-mixed" if bf16 else "32-true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), loader_of(dataset))  # fmt: skip


PEERS: dict[str, Callable[[Any, bool], None]] = {"plain": plain, "lightning": lightning}


def rank(way: str, precision: str, threads: int, steps: int) -> None:
    """One rank of a peer, under torchrun or alone; rank 0 prints its figures as JSON."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    ends = list[float]()  # of the steps, by the age of the process
    register_optimizer_step_post_hook(lambda *_: ends.append(process_age_s()))
    PEERS[way](Images(steps), precision == "bf16")
    if len(ends) != steps:
        sys.exit(f"peers.py: {way} made {len(ends)} steps of {steps}")
    if os.environ.get("RANK", "0") == "0":
        rate = (steps - WARM) * BATCH / (ends[-1] - ends[WARM - 1])
        print(f"\n{json.dumps({'start_s': ends[0], 'images_per_s': rate})}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # torch aborts now and then as a program of several Gloo ranks ends


def ours(ranks: int, precision: str, threads: int, steps: int, folder: str) -> list[str]:
    """The words that train with the payload, as run.sh starts it."""
    words = f"""-m jobkit.payload.main --run-dir {folder}/run --data-dir {folder} --lr {LR}
        --strategy {"ddp" if ranks > 1 else "single"} --dataset synthetic --test-samples 10
        --train-samples {BATCH * steps} --epochs 1 --global-batch-size {BATCH} --device cpu
        --precision {precision} --threads {threads} --warmup-iterations {WARM}
        --why 0"""
    return words.split()


def run(way: str, ranks: int, precision: str, steps: int) -> dict[str, float]:
    """One training of one way: its figures, and the CPU seconds of all its processes."""
    from support.records import records_of  # not at the head, which every rank of a peer runs

    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    env = {k: v for k, v in ENV.items() if not k.startswith(("JOBKIT_", "SLURM_"))}
    env["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as folder:
        words = [__file__, "--rank", way, precision, str(threads), str(steps)]
        if way == "ours":
            words = ours(ranks, precision, threads, steps, folder)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *(TWO_RANKS if ranks > 1 else []), *words],
            env=env, cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(f"peers.py: {way}, {ranks} ranks: {done.stderr[-2000:]}")
        if way == "ours":
            records = {r["kind"]: r for r in records_of(Path(folder, "run/metrics/0.jsonl"))}
            start = records["startup"]  # the second, of after the first step
            found = {"start_s": start["total_s"] + start["first_step_s"]}
            found["images_per_s"] = records["epoch"]["images_per_s"]
        else:
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"start_s')]
            found = json.loads(lines[-1])
    found["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found


def compare(name: str, found: dict[str, list[dict[str, float]]]) -> Figures:
    """Print the table of one setting; return ours over the best peer."""
    print(f"{name:14}    images/s   first step      CPU   ours / it: rate   start     CPU")
    mids, ratios = dict[str, tuple[float, ...]](), dict[str, tuple[float, ...]]()
    for way, rounds in found.items():
        columns = {k: [one[k] for one in rounds] for k in ("images_per_s", "start_s", "cpu_s")}
        mids[way] = tuple(map(median, columns.values()))
        ours = ([one[k] for one in found["ours"]] for k in columns)
        ratios[way] = tuple(map(ratio, ours, columns.values()))
        line = "  {:12} {:8.0f} {:10.2f} s {:6.1f} s".format(way, *mids[way])
        print(line + ("" if way == "ours" else "{:19.2f} {:7.2f} {:7.2f}".format(*ratios[way])))
    peers = [way for way in found if way != "ours"]
    best = max(peers, key=lambda way: mids[way][0])
    quickest = min(peers, key=lambda way: mids[way][1])
    return {f"{name}: rate": ratios[best][0], f"{name}: start": ratios[quickest][1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    parser.add_argument("--steps", type=int, default=14, help="optimizer steps (default 14)")
    args = parser.parse_args()
    ways = ["ours", *(way for way in PEERS if way == "plain" or find_spec(way))]
    print(f"of {', '.join(PEERS)} these are installed: {', '.join(ways[1:])}")
    figures, rates, starts = Figures(), Figures(), Figures()
    for precision in precisions():
        for ranks in (1, 2):
            name = f"{precision}, {ranks} rank" + "s" * (ranks > 1)
            found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for way in turns(ways, args.rounds):
                found[way].append(run(way, ranks, precision, args.steps))
            figures |= compare(name, found)
            rates[f"{name}: rate"] = LIMITS[precision]
            starts[f"{name}: start"] = 1
    return report(figures, at_least=rates, at_most=starts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(main())
