# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---
# %% [markdown]
# # Distributed training
#
# Each strategy of jobkit, run on this machine. Every number and picture below is measured when the
# notebook is executed; nothing needs a GPU. What the strategies are is in docs/strategies.md.
# %%
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from jobkit.analysis.collect.results import collect
from jobkit.paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "docs" / "exercises"))  # the exercises' scripts
import exercise_3_1
import exercise_4_1
import exercise_4_2
import exercise_4_3
import schedule
from ranks import show

os.environ["JOBKIT_LOGS"] = tempfile.mkdtemp(prefix="jobkit-notebook-")
pictures = Path(os.environ.get("NOTEBOOK_PICTURES") or os.environ["JOBKIT_LOGS"])
small = "--train-samples 512 --test-samples 64 --epochs 2 --global-batch-size 64 --threads 1"
base = ["run", "--site", "local", "--study", "demo", "--why", "0", *small.split()]


def jobkit(*words: str) -> str:
    """Run a command of jobkit; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "jobkit", *words], capture_output=True, text=True, check=True
    )
    return done.stdout


# %% [markdown]
# ## Data parallelism
#
# Each rank sees its share of the samples, and gradients are averaged. DataParallel (`dp`) is one
# process with all devices of a node; DistributedDataParallel (`ddp`) is one process per device. On
# one device, as on a CPU, `dp` computes what `single` does: the comparison below runs both.
# %%
show(*exercise_3_1.shares())
show(*exercise_4_1.gradients())

# %% [markdown]
# ## Model parallelism and pipelines
#
# Layers are distributed over ranks. Under `mp` the ranks compute one after the other: two share the
# parameters between them, which saves memory and no time.
# %%
jobkit(*base, "--name", "layers", "--strategies", "mp", "--gpus", "2")
(row,) = collect("layers").runs.to_dict("records")
print(f"mp on {int(row['world_size'])} ranks: {float(row['throughput']):.0f} images/s")

# %% [markdown]
# A pipeline (`pp`) cuts a batch into microbatches, so that stages work at once. The slots below are
# measured: F forward, B backward, and the number of the microbatch. Each slot is made 20 ms long:
# four stages on two cores would wait for cores too. Without the time of messages 3 of 7 slots of a
# stage would be idle, 43 %, in both schedules. 1F1B runs backward passes earlier, so that fewer
# microbatches' activations are held at once.
# %%
figure, axes = plt.subplots(2, 1, figsize=(13, 6), layout="constrained")
for axis, order in zip(axes, ("gpipe", "1f1b"), strict=True):
    slots = schedule.measure(order)
    for slot in slots:
        length = slot.end_ms - slot.begin_ms
        colour = "tab:blue" if slot.kind == "F" else "tab:orange"
        bar = axis.barh(slot.stage, length, left=slot.begin_ms, color=colour, edgecolor="white")
        axis.bar_label(bar, [f"{slot.kind}{slot.microbatch + 1}"], label_type="center")
    axis.set(yticks=range(4), yticklabels=[f"stage {i}" for i in range(4)], xlabel="ms")
    axis.invert_yaxis()
    idle = 1 - sum(s.end_ms - s.begin_ms for s in slots) / 4 / max(s.end_ms for s in slots)
    changes = [{"F": 1, "B": -1}[slot.kind] for slot in slots if slot.stage == 3]
    held = max(itertools.accumulate(changes))
    axis.set(title=f"{order}: {idle:.0%} idle; microbatches held by the last stage: {held}")
    print(axis.get_title())
figure.savefig(pictures / "pipeline.png", dpi=80)

# %% [markdown]
# ## FSDP
#
# Parameters, gradients and optimizer state are sharded. How much a rank holds at each moment, and
# what it costs:
# %%
show(*exercise_4_2.forward())
show(*exercise_4_2.groups())
show(*exercise_4_3.per_step())

# %% [markdown]
# ## Memory calculator
#
# 7 billion parameters with AdamW on 8 GPUs. Activations come on top of it.
# %%
print(jobkit("memory", "--parameters", "7e9", "--optimizer", "adamw", "--gpus", "8"))

# %% [markdown]
# ## Comparison
#
# A study of real trainings on two ranks (`single` and `dp` on one process): throughput, memory per
# rank, and the speed-up over `single` divided by the number of ranks.
# %%
jobkit(*base, "--name", "one", "--strategies", "single", "dp", "--gpus", "1")
jobkit(*base, "--name", "two", "--strategies", "ddp", "fsdp", "--gpus", "2")
table = pd.concat([collect("one").runs, collect("two").runs]).set_index("strategy")
table = table.loc[["single", "dp", "ddp", "fsdp"]]
rate, memory = table["throughput"].astype(float), table["peak_memory_mib"].astype(float)
ranks = table["world_size"].astype(int)
efficiency = rate / rate["single"] / ranks
labels = [f"{name}\n{count} rank{'s' * (count > 1)}" for name, count in ranks.items()]
figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
bars = {"images/s": rate, "peak memory per rank (MiB)": memory, "parallel efficiency": efficiency}
for axis, (title, values) in zip(axes, bars.items(), strict=True):
    axis.bar_label(axis.bar(labels, values, color=["tab:gray", "C0", "C1", "C2"]), fmt="%.3g")
    axis.margins(y=0.12)  # room for the numbers above the bars
    axis.set(title=title)
for name, *values in zip(table.index, rate, memory, efficiency, strict=True):
    print("{}: {:.0f} images/s, {:.0f} MiB, efficiency {:.2f}".format(name, *values))
figure.savefig(pictures / "comparison.png", dpi=80)

# %% [markdown]
# Two epochs on a busy laptop are no benchmark: docs/results.md says what one needs. Chapter 7 of
# docs/exercises has the commands of a study with repeats.
