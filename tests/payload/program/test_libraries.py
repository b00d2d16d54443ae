"""The real libraries on two ranks with Gloo, measured by the hook; each has a slow evaluation.

`make test` has Accelerate alone, as the imports of the others cost more than all the rest.
"""

import importlib.util
from pathlib import Path

import pytest

from support import needs
from support.training_programs import LEAP
from support.warm_programs import Warm

LEAP_S = 1000.0  # of each batch of evaluation, which must not count

LIGHTNING = """
import torch, warnings
warnings.simplefilter("ignore")
import lightning as L
from torch.utils.data import DataLoader, TensorDataset
class Net(L.LightningModule):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(8, 2)
    def training_step(self, batch, i):
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss); return loss
    def validation_step(self, batch, i):
        leap(1000.0)
        self.log("val_loss", torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
data = TensorDataset(torch.randn(160, 8), torch.randint(2, (160,)))
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
    accumulate_grad_batches=2, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), DataLoader(data, 4), DataLoader(data, 80))
"""

TRANSFORMERS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
class Data(torch.utils.data.Dataset):
    def __init__(self, rows, leap): self.rows, self.leap = rows, leap
    def __len__(self): return self.rows
    def __getitem__(self, i):
        if self.leap: leap(self.leap)
        ids = torch.arange(16) % 7
        return {"input_ids": ids, "labels": ids}
config = GPT2Config(vocab_size=10, n_positions=16, n_embd=16, n_layer=1, n_head=2,
    bos_token_id=0, eos_token_id=0)
args = TrainingArguments("out", per_device_train_batch_size=4, gradient_accumulation_steps=2,
    num_train_epochs=2, logging_steps=10, use_cpu=True, report_to=[], save_strategy="no",
    eval_strategy="epoch", disable_tqdm=True, ddp_backend="gloo")
Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Data(160, 0),
    eval_dataset=Data(32, 1000 / 16)).train()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(160, 8), torch.randint(2, (160,)))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader, valid = accelerator.prepare(
    model, optimizer, DataLoader(data, 4), DataLoader(data, 80))
def evaluate():
    for x, y in valid:
        with torch.no_grad(): model(x)
        leap(1000.0)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
    evaluate()
"""
PROGRAMS = {"lightning": LIGHTNING, "transformers": TRANSFORMERS, "accelerate": ACCELERATE}


@pytest.mark.long
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_framework_is_measured_on_two_ranks(
    library: str, libraries: Warm, tmp_path: Path
) -> None:
    check(library, libraries, tmp_path)


def test_accelerate_is_measured_on_two_ranks(warm: Warm, tmp_path: Path) -> None:
    check("accelerate", warm, tmp_path)


def check(library: str, warm: Warm, tmp_path: Path) -> None:
    """The library measures what it trains, on both ranks."""
    if importlib.util.find_spec(library) is None:
        needs.unavailable(f"{library} is not installed (make venv, or pip install '.[adapters]')")
    ran = warm.run(tmp_path, LEAP + PROGRAMS[library], ranks=2)
    assert ran.codes == [0, 0], ran.err
    for rank in range(2):
        # 160 samples in batches of 4, of which 2 are one step, on 2 ranks, for 2 epochs.
        assert ran.sums(rank) == (20, 160), ran.out
        windows = ran.records("window", rank)
        wall = sum(w["wall_s"] for w in windows if not w["warmup"])
        assert wall < LEAP_S, "a batch of evaluation is in the time"
        assert sum(w["paused_s"] for w in windows) >= LEAP_S
        assert all(w["data_wait_s"] <= w["wall_s"] for w in windows)
    start = ran.records("run_start")[0]
    assert (start["source"], start["unit"], start["world_size"]) == ("auto", "samples", 2)
    assert ["[METRIC]" in out for out in ran.out] == [True, False]
