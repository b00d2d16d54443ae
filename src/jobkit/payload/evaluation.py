"""The evaluation of a model on the test samples."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from jobkit.payload.batches import DeviceData, share
from jobkit.payload.strategies import Strategy
from jobkit.payload.tta import predicted
from jobkit.spec.runspec import RunSpec


def evaluate(
    strategy: Strategy, data: DeviceData, spec: RunSpec, alive: Callable[[], None] | None
) -> dict[str, float]:
    """This rank's sums over its test samples: val_loss, val_correct, val_samples.

    Every sample once over all ranks; each rank calls the model as often as the others. alive: told
    after each batch.
    """
    strategy.model.eval()
    strategy.share_buffers()
    rank, ranks = strategy.data_rank, strategy.data_world_size
    count = len(data.test.labels)
    chunk = spec.eval_batch_size * ranks
    sums = torch.zeros(2, dtype=torch.float64, device=data.device)
    seen = 0
    for start in range(0, count, chunk):
        mine = share(min(chunk, count - start), rank, ranks)
        size = mine.stop - mine.start
        # A rank with nothing left takes part with one sample that is not counted.
        part = slice(start + mine.start, start + mine.start + size) if size else slice(0, 1)
        images, labels = data.test_batch(part)
        logits = predicted(strategy.predict, images, spec.tta)
        if alive:
            alive()
        if size and strategy.counts:
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(1) == labels).sum()
            seen += size
    loss, correct = sums.tolist()
    return {"val_loss": loss, "val_correct": correct, "val_samples": float(seen)}


def means(sums: Mapping[str, float]) -> tuple[float, float]:
    """Validation loss and accuracy of the sums over all ranks that evaluate gives."""
    return sums["val_loss"] / sums["val_samples"], sums["val_correct"] / sums["val_samples"]
