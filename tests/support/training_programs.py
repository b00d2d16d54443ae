"""Training programs as users have them: of plain torch, of three libraries, and odd ones.

Each of torch trains the same: 320 rows of 8 numbers for 2 epochs, in batches of 4 on each rank. The
libraries take two batches a step, and evaluate after each epoch.
"""

# torch aborts now and then while the interpreter is finalised (a thread of Gloo asks for the GIL):
# the tests are not about that. Before torch, so that it runs last of all functions at the end.
LEAVES = """
import atexit, os, sys
leap = globals().get("leap", lambda seconds: None)  # LEAP's, where a test has it
def _end():
    sys.stdout.flush(); sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_value") or hasattr(sys, "last_exc") else 0)
atexit.register(_end)
"""

# leap(s) is a wait of s seconds that takes no time: only the clock that measures goes on. So long
# a wait is seen also on a machine that is busy with something else.
LEAP = """
import time
_over, _clock = [0.0], time.perf_counter
time.perf_counter = lambda: _clock() + _over[0]
def leap(seconds): _over[0] += seconds
"""

# Without torch: under a fault of a drill attempt 0 ends by it alone.
UNTIL_HIT = """
import os, pathlib, signal, sys, time
stop, env = [], os.environ
signal.signal(signal.SIGUSR2, lambda *_: stop.append(True))
ready = pathlib.Path(env["JOBKIT_RUN_DIR"], "ready-" + env["RANK"])
ready.touch()
while len(list(ready.parent.glob("ready-?"))) < 2:  # both must be there
    time.sleep(0.01)
while env["JOBKIT_RUN_ID"] != "reference" and env["JOBKIT_ATTEMPT"] == "0" and not stop:
    time.sleep(0.01)
sys.exit(75 if stop else 0)
"""

# Not one line of it knows of jobkit, nor of the number of ranks that it will get.
PLAIN = """
import os, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.set_num_threads(1)
data = TensorDataset(torch.randn(320, 8), torch.randint(2, (320,)))
loader = DataLoader(data, 4, sampler=DistributedSampler(data))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.barrier()
"""

LIGHTNING = """
import os, torch, warnings
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
here, folder = int(os.environ["LOCAL_WORLD_SIZE"]), os.environ["JOBKIT_RUN_DIR"]
data = TensorDataset(torch.randn(320, 8), torch.randint(2, (320,)))
trainer = L.Trainer(accelerator="cpu", devices=here,
    num_nodes=int(os.environ["WORLD_SIZE"]) // here, strategy="ddp", max_epochs=2, logger=False,
    accumulate_grad_batches=2, default_root_dir=folder, enable_progress_bar=False,
    enable_model_summary=False)
trainer.fit(Net(), DataLoader(data, 4), DataLoader(data, 160))
torch.distributed.barrier()
"""

TRANSFORMERS = """
import os, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
class Data(torch.utils.data.Dataset):
    def __init__(self, rows, leap_s): self.rows, self.leap_s = rows, leap_s
    def __len__(self): return self.rows
    def __getitem__(self, i):
        if self.leap_s: leap(self.leap_s)
        ids = torch.arange(8) % 7
        return {"input_ids": ids, "labels": ids}
config = GPT2Config(vocab_size=10, n_positions=8, n_embd=8, n_layer=1, n_head=1,
    bos_token_id=0, eos_token_id=0)
args = TrainingArguments(os.environ["JOBKIT_RUN_DIR"] + "/out", per_device_train_batch_size=4,
    gradient_accumulation_steps=2, num_train_epochs=2, logging_steps=10, use_cpu=True,
    report_to=[], save_strategy="no", eval_strategy="epoch", disable_tqdm=True, ddp_backend="gloo")
Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Data(320, 0),
    eval_dataset=Data(32, 1000 / 16)).train()
if torch.distributed.is_initialized(): torch.distributed.barrier()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(320, 8), torch.randint(2, (320,)))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader, valid = accelerator.prepare(
    model, optimizer, DataLoader(data, 4), DataLoader(data, 160))
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
accelerator.wait_for_everyone()
"""

# nanoGPT's line, at 100 ms over the ranks; the first step has the start-up in it.
PRINTS = """
import os
if os.environ["RANK"] == "0":
    ms = 100 / int(os.environ["WORLD_SIZE"])
    for step in range(0, 200, 10):
        print(f"iter {step}: loss 3.0, time {900 if step == 0 else ms:.2f}ms, mfu 30.00%")
"""

OF_TORCH = {
    "plain": PLAIN, "lightning": LIGHTNING, "transformers": TRANSFORMERS, "accelerate": ACCELERATE
}  # fmt: skip
PROGRAMS = {name: LEAVES + text for name, text in OF_TORCH.items()}
