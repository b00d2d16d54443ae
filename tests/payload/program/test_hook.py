"""The start-up hook on programs that know nothing of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.forks import free_port
from support.training_programs import LEAP
from support.warm_programs import AUTO, Warm, run

HEAD = LEAP
HEAD += """
import os, sys, torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randint(2, (96,)))
loader = DataLoader(data, 8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
sgd = torch.optim.SGD(model.parameters(), 0.1)
def train(batch, *optimizers):
    for each in optimizers: each.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    for each in optimizers: each.step()
"""
# What programs do; and the least time that must be paused.
PROGRAMS = re.split(
    r"^# (.+): ([0-9]+) steps, ([0-9]+) samples, ([0-9]+) s paused\n",
    """# evaluation under no_grad, also before the training: 24 steps, 192 samples, 800 s paused
def evaluate():
    with torch.no_grad():
        for x, y in DataLoader(data, 48): model(x); leap(400.0)
evaluate()
for epoch in range(2):
    for batch in loader: train(batch, sgd)
    evaluate()
# evaluation that asks with gradients: 36 steps, 288 samples, 1600 s paused
for epoch in range(2):
    for batch in loader: train(batch, sgd)
    for x, y in DataLoader(data, 48):
        with torch.no_grad(): model(x)
        leap(400.0)
for batch in loader: train(batch, sgd)
# evaluation within the epoch, cut short: 24 steps, 192 samples, 1600 s paused
valid = DataLoader(data, 8)
for epoch in range(2):
    for i, batch in enumerate(loader):
        if i == 6:
            for j, (x, y) in enumerate(valid):
                if j == 2: break
                with torch.no_grad(): model(x)
                leap(400.0)
        train(batch, sgd)
# a batch of evaluation before each step, whose loader goes on: 12 steps, 96 samples, 4800 s paused
valid, batches = iter(DataLoader(data, 8)), iter(loader)
for i in range(12):
    with torch.no_grad(): model(next(valid)[0]); leap(400.0)
    train(next(batches), sgd)
# two optimizers: 24 steps, 192 samples, 0 s paused
adam = torch.optim.Adam(model.parameters())
for epoch in range(2):
    for batch in loader: train(batch, sgd, adam)
# another optimizer after the first: 24 steps, 192 samples, 0 s paused
for batch in loader: train(batch, sgd)
del sgd
adam = torch.optim.Adam(model.parameters(), fused=True)
for batch in loader: train(batch, adam)
# accumulation: 12 steps, 384 samples, 0 s paused
for epoch in range(4):
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        if i % 4 == 3: sgd.step(); sgd.zero_grad()
# a loader that is not torch's: 23 steps, 0 samples, 0 s paused
for i in range(24):  # the begin of the first step is not seen
    train((torch.randn(8, 8), torch.zeros(8, dtype=torch.long)), sgd)
# a scaler that skips steps: 20 steps, 192 samples, 0 s paused
scaler = torch.amp.GradScaler("cpu")
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if i in (2, 7) else 1.0)).backward()
        scaler.step(sgd); scaler.update(); sgd.zero_grad()
# closures: 12 steps, 96 samples, 0 s paused
lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
for x, y in loader:
    def closure():
        lbfgs.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); return loss
    lbfgs.step(closure)
# a compiled step: 24 steps, 192 samples, 0 s paused
import logging; logging.disable()  # torch warns of its own profiler
step = torch.compile(lambda: sgd.step(), backend="eager")
for epoch in range(2):
    for x, y in loader:
        sgd.zero_grad(); F.cross_entropy(model(x), y).backward(); step()
# workers that persist, and batches that are dictionaries: 24 steps, 192 samples, 0 s paused
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 96
    def __getitem__(self, i): return {"name": "a", "x": data[i][0], "y": data[i][1]}
loader = DataLoader(Rows(), 8, num_workers=2, persistent_workers=True)
for epoch in range(2):
    for batch in loader: train((batch["x"], batch["y"]), sgd)
""",
    flags=re.MULTILINE,
)[1:]


@pytest.mark.parametrize(
    ("steps", "work", "paused", "program"),
    list(zip(*(PROGRAMS[i::5] for i in range(1, 5)), strict=True)),
    ids=PROGRAMS[::5],
)
def test_a_program_is_measured_unchanged(steps, work, paused, program, tmp_path, warm) -> None:
    ran = warm.run(tmp_path, HEAD + program)
    assert (ran.codes, ran.err) == ([0], [""])
    assert ran.sums() == (int(steps), int(work))
    windows = ran.records("window")
    lost = sum(w["paused_s"] for w in windows)
    # A batch of evaluation takes 400 s; evaluation after the last step is in no window.
    assert 0 <= lost - float(paused) < 400
    start = ran.records("run_start")
    assert [s["source"] for s in start] == ["auto"]
    assert start[0]["work_source"] == ("inferred" if start[0]["unit"] else None)
    assert [w["seq"] for w in windows] == list(range(1, len(windows) + 1))


def test_data_wait_is_what_the_program_waits(tmp_path: Path, warm: Warm) -> None:
    program = """
class Slow(TensorDataset):
    def __getitem__(self, i): leap(2.0); return super().__getitem__(i)
begin, waited = time.perf_counter(), 0.0
iterator = iter(DataLoader(Slow(*data.tensors), 8))
while True:
    asked = time.perf_counter()
    batch = next(iterator, None)
    waited += time.perf_counter() - asked
    if batch is None: break
    train(batch, sgd)
print(waited, time.perf_counter() - begin, file=sys.stderr)
"""
    ran = warm.run(tmp_path, HEAD + program, JOBKIT_WARMUP_STEPS="0")
    windows = ran.records("window")
    own_wait, own_wall = map(float, ran.err[0].split())
    assert sum(w["data_wait_s"] for w in windows) == pytest.approx(own_wait, rel=0.1)
    assert sum(w["wall_s"] for w in windows) == pytest.approx(own_wall, rel=0.1)
    assert own_wait >= 96 * 2.0


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_ranks_that_the_program_starts_itself(tmp_path: Path, warm: Warm, method: str) -> None:
    program = """
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp
        def rank(own, ranks):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
            dist.init_process_group("gloo", rank=own, world_size=ranks)
            model = torch.nn.Linear(4, 1)
            adam = torch.optim.Adam(model.parameters())
            data = torch.utils.data.DataLoader(torch.randn(48, 4), 4)
            for x in data: model(x).sum().backward(); adam.step()
            dist.destroy_process_group()
        if __name__ == "__main__":
            mp.start_processes(rank, (2,), nprocs=2, start_method={!r})
    """
    start = run if method == "spawn" else warm.run
    ran = start(tmp_path, program.format(method), PORT=str(free_port()))
    assert ran.codes == [0], ran.err
    assert [ran.sums(rank)[1] for rank in range(2)] == [48, 48]
    start = ran.records("run_start", rank=1)[0]
    assert (start["world_size"], start["threads"] >= 1) == (2, True)


BITS = """
import hashlib
loader = DataLoader(data, 8, shuffle=True, num_workers=1)
adam = torch.optim.AdamW(model.parameters(), 0.01)
for epoch in range(2):
    for batch in loader: train(batch, adam)
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(data, 48): model(x)
    model.train()
state = [*model.state_dict().values(), torch.get_rng_state()]
for values in adam.state.values(): state += values.values()
print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in state)).hexdigest(), file=sys.stderr)
print("hooked", "jobkit_auto" in sys.modules)
"""


def test_a_program_of_its_own_is_measured_or_not_and_computes_the_same_bits(tmp_path: Path) -> None:
    """From the start of its Python; JOBKIT_AUTO=0 switches the hook off."""
    (tmp_path / "off").mkdir()
    on, off = run(tmp_path, HEAD + BITS), run(tmp_path / "off", HEAD + BITS, JOBKIT_AUTO="0")
    assert (on.codes, off.codes) == ([0], [0])
    assert len(on.err[0].strip()) == 64 and on.err == off.err
    assert on.sums() == (24, 192) and "hooked True\n" in on.out[0]
    assert [s["source"] for s in on.records("run_start")] == ["auto"]
    assert off.out == ["hooked False\n"] and not off.metrics.exists()


def test_a_program_with_the_meter_is_measured_by_the_meter(tmp_path: Path, warm: Warm) -> None:
    program = """
from jobkit import meter
meter.start(unit="rows")
for batch in meter.batches(loader): train(batch, sgd); meter.step(work=2)
meter.end()
"""
    ran = warm.run(tmp_path, HEAD + program)
    assert (ran.codes, ran.err, ran.sums()) == ([0], [""], (12, 24))
    assert [r["source"] for r in ran.records("run_start")] == ["meter"]


def test_what_fails_in_the_hook_does_not_end_the_program(tmp_path: Path, warm: Warm) -> None:
    program = """
class Batch:
    @property
    def shape(self): raise ValueError("no\\n  shape")
for _ in DataLoader(data, 8, collate_fn=lambda rows: Batch()): train(data.tensors, sgd)
print("trained")
"""
    ran = warm.run(tmp_path, HEAD + program)
    assert (ran.codes, ran.out) == ([0], ["trained\n"])
    assert ran.err == ["jobkit meter: ValueError: no shape; measuring ends\n"]


def test_the_users_own_start_up_files_run(tmp_path: Path) -> None:
    env = {**os.environ, "JOBKIT_AUTO": "1", "PYTHONPATH": f"{AUTO}:{tmp_path}"}

    def said(file: str, program: str) -> tuple[str, str]:
        (tmp_path / "sitecustomize.py").write_text(file)
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    program = "import sys, sitecustomize; print(sys.first, sitecustomize.__file__, sys.path)"
    out, err = said("import sys\nsys.first = 'first'\n", program)
    assert out.startswith(f"first {tmp_path}/sitecustomize.py ") and str(AUTO) not in out + err
    out, err = said("raise ValueError('mine')", "print('runs')")
    assert out == "runs\n" and "ValueError: mine" in err  # as Python reports it without the hook
