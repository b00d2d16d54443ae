"""One rank of a peer: `peer.py WAY PRECISION THREADS STEPS`, under torchrun or alone.

Ways: plain (the tutorials' loop), lightning, accelerate, transformers (its Trainer). Each trains
jobkit's CNN on the same random images (worker.py's), one epoch of STEPS steps of 256 images over
all ranks, in the main process (no loader workers), with the same optimizer. The clock is the same
for all peers: a hook that torch calls after each optimizer step. Rank 0 prints one line of JSON:
seconds from the start of the process to the end of the first step, and images a second after WARM
steps.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from worker import BATCH, LR, PilImages

from jobkit.payload.host import process_age_s
from jobkit.payload.model import CNN

WARM = 2
RANKS = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of every way."""
    return torch.optim.SGD(
        model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4
    )


def loader_of(dataset: Dataset, sampler: object = None) -> DataLoader:
    """Batches of one rank's share."""
    return DataLoader(dataset, BATCH // RANKS, shuffle=sampler is None, sampler=sampler)


def plain(dataset: Dataset, bf16: bool) -> None:
    """The tutorial's loop; under torchrun with DistributedDataParallel."""
    model, sampler = CNN(10), None
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(dataset)
    optimizer = sgd(model)
    for x, y in loader_of(dataset, sampler):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(x)
        F.cross_entropy(logits.float(), y).backward()
        optimizer.step()


def lightning(dataset: Dataset, bf16: bool) -> None:
    """A LightningModule and its Trainer, without logger, checkpoints and bars."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = CNN(10)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.model(x).float(), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        precision="bf16-mixed" if bf16 else "32-true",
        max_epochs=1,
        **off,
    )
    trainer.fit(Module(), loader_of(dataset))


def accelerate(dataset: Dataset, bf16: bool) -> None:
    """The tutorial's loop with Accelerate's prepare and backward."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if bf16 else "no")
    model = CNN(10)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader_of(dataset))
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x).float(), y))
        optimizer.step()


def transformers(dataset: Dataset, bf16: bool) -> None:
    """transformers' Trainer, without logging, checkpoints, clipping and bars."""
    import tempfile

    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **_: object) -> Tensor:
            return F.cross_entropy(model(inputs["x"]).float(), inputs["y"])

    def collate(pairs: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        return {
            "x": torch.stack([x for x, _ in pairs]),
            "y": torch.tensor([y for _, y in pairs]),
        }

    model = CNN(10)
    optimizer = sgd(model)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=bf16,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH // RANKS,
            max_grad_norm=0.0,
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        Own(
            model,
            arguments,
            data_collator=collate,
            train_dataset=dataset,
            optimizers=(optimizer, rate),
        ).train()


WAYS: dict[str, Callable[[Dataset, bool], None]] = {
    way.__name__: way for way in (plain, lightning, accelerate, transformers)
}


def main(way: str, precision: str, threads: int, steps: int) -> None:
    """Train; rank 0 prints its figures."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    ends, first = list[float](), list[float]()

    def ended(*_: object) -> None:
        if not ends:
            first.append(process_age_s())
        ends.append(time.perf_counter())

    register_optimizer_step_post_hook(ended)
    WAYS[way](PilImages(steps), precision == "bf16")
    if len(ends) != steps:
        sys.exit(f"peer.py: {way} made {len(ends)} steps of {steps}")
    if RANK == 0:
        rate = (steps - WARM) * BATCH / (ends[-1] - ends[WARM - 1])
        found = {"first_step_s": first[0], "images_per_s": rate}
        print(f"\n{json.dumps(found)}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # torch aborts now and then as a program of several Gloo ranks ends


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
