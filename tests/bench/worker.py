"""A process that trains when it is told to: `worker.py LOOP PRECISION THREADS`.

Loops: plain-0 and plain-2, the recipe of many tutorials (PIL images, torchvision transforms, a
DataLoader with 0 or 2 workers); payload or payload-STRATEGY, the payload's own loop, and with
+contiguous, +compile or +resnet18 after it, that setting in place of the default. Each trains
the same CNN on the same number of images. For each line on standard input it trains once and
answers with one line: images a second, and the share of the time spent waiting for data. The line
"nodata" has the payload's loop take one batch that lies ready: in the same process, because two
processes differ by more than what is measured here. Under torchrun, plain-* is wrapped in
DistributedDataParallel.
"""

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, BATCHES = 256, 14
LR = 0.01
SETTINGS = {
    "contiguous": {"channels_last": False},
    "compile": {"compile": True},
    "resnet18": {"model": "resnet18"},
}
Measure = Callable[[str], tuple[float, float]]


class PilImages(Dataset):
    """Random images as a dataset of files gives them: one PIL image at a time, transformed."""

    def __init__(self, batches: int = BATCHES) -> None:
        from torchvision import transforms

        generator = torch.Generator().manual_seed(0)
        count = BATCH * batches
        self.images = torch.randint(256, (count, 32, 32, 3), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(10, (count,), generator=generator).tolist()
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

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        image = Image.fromarray(self.images[index].numpy())
        return self.transform(image), self.labels[index]


def plain(precision: str, workers: int) -> Measure:
    """The tutorial's loop, on the same CNN."""
    from jobkit.payload.model import CNN

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    model, dataset, sampler = CNN(10), PilImages(), None
    if world_size > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=BATCH // world_size,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4
    )

    def measure(_: str) -> tuple[float, float]:
        start, images = time.perf_counter(), 0
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = model(x)
            F.cross_entropy(logits.float(), y).backward()
            optimizer.step()
            images += len(y) * world_size
        return images / (time.perf_counter() - start), float("nan")

    return measure


def payload(strategy: str, precision: str, threads: int, *changed: str) -> Measure:
    """The payload's own loop, with its batches or, told "nodata", with one that lies ready."""
    from jobkit.payload.clock import Stages
    from jobkit.payload.job import RankJob
    from jobkit.payload.place import read_rank_env
    from jobkit.payload.report import Reporter
    from jobkit.payload.run import _set_up
    from jobkit.spec.runspec import RunSpec

    spec = RunSpec(
        strategy=strategy, dataset="synthetic", train_samples=BATCH * BATCHES, test_samples=10,
        global_batch_size=BATCH, precision=precision, threads=threads, lr=LR,
        warmup_iterations=0,
        **{name: value for each in changed for name, value in SETTINGS[each].items()},
    )  # fmt: skip
    job = RankJob(spec=spec, place=read_rank_env(), paths=None, dry_run=True)
    trainer = _set_up(job, Reporter(None, 0, 1), Stages(imported_s=0.0))
    ready = trainer.data.training_batch(torch.arange(BATCH), 0)
    loads = {"": trainer.data.training_batch, "nodata": lambda *_: ready}

    def measure(how: str) -> tuple[float, float]:
        trainer.data.training_batch = loads[how]
        clock, _, _ = trainer.train_epoch(1, lambda _: None)
        return clock.images / clock.elapsed_s(), clock.data_wait_s / clock.elapsed_s()

    return measure


def main(loop: str, precision: str, threads: int) -> None:
    """Get ready, say so, then measure once for each line."""
    torch.set_num_threads(threads)
    if loop.startswith("plain"):
        measure = plain(precision, int(loop.split("-")[1]))
    else:
        loop, *changed = loop.split("+")
        measure = payload(loop.partition("-")[2] or "single", precision, threads, *changed)
    measure("")  # warm up
    if "RANK" in os.environ:  # under torchrun: no other rank, so several measures at once
        rates = [measure("")[0] for _ in range(3)]
        if os.environ["RANK"] == "0":
            print(sorted(rates)[1], flush=True)
        return
    print("ready", flush=True)
    for line in sys.stdin:
        print(*measure(line.strip()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
