"""What the parts of a GPU check measured, read from the files that they left."""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from jobkit.checks.gpu_check import expected
from jobkit.checks.gpu_check.expected import Measure
from jobkit.metric.line import Record
from jobkit.metric.reader import read_file
from jobkit.paths import RunPaths, read_json

_WAIT_SHARE = 0.05  # chosen; the order of an epoch and the crops are on the GPU
_SMALL_BYTES = 65536
GPU_LISTING = "nvidia-smi-topo.txt"
PROCESSES = "gpu-processes.csv"  # pid, UUID of a GPU: a line for each second, process and GPU


def gpu_of(folder: Path) -> str:
    """Return the name of the GPU, as the step part of the same check found it; else empty."""
    return str((read_json(folder.parent / "step" / "step.json") or {}).get("device", ""))


def link_of(folder: Path) -> str:
    """Return the link between the first two GPUs by `nvidia-smi topo -m`, as NV18; else empty."""
    try:
        text = (folder.parent / GPU_LISTING).read_text()
    except OSError:
        return ""
    found = re.search(r"^\s*GPU0\s+X\s+(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", text, re.MULTILINE)
    return found[1] if found else ""


def step(folder: Path) -> list[Measure]:
    """Return the waits and times of training steps, and the speed of the GPU."""
    found = json.loads((folder / "step.json").read_text())
    gpu, speeds = found["device"], found["speeds"]
    made = [expected.product(k, speeds.get(f"{k}_tflops"), gpu) for k in ("fp32", "tf32", "bf16")]
    made.append(expected.memory(speeds.get("memory_gb_per_s"), gpu))
    if "from_host_gb_per_s" in speeds:
        why = "chosen: over a third of PCIe 3.0 x16 (15.75 GB/s in one direction)"
        made.append(
            Measure("copy from the host", speeds["from_host_gb_per_s"], "GB/s", 6.0, None, why)
        )
        made.append(
            Measure("error of fp32 products", speeds["fp32_error"], "", None, 1e-5, "24 bits")
        )
        why = "11 bits: less means that --fp32 tf32 changed nothing (as on GPUs before Ampere)"
        made.append(Measure("error of tf32 products", speeds["tf32_error"], "", 2e-5, 1e-2, why))
    for one in found["steps"]:
        made += _of_steps(one, on_gpu="from_host_gb_per_s" in speeds)
    return made


def _of_steps(one: dict[str, Any], on_gpu: bool) -> list[Measure]:
    name = f"{one['model']} {one['strategy']} {one['precision']}"
    waited = None if not on_gpu else float(bool(one["waits"]))
    why = one["waits"] or "a step reads nothing back from the GPU" if on_gpu else "no GPU"
    made = [Measure(f"{name}: steps that wait for the GPU", waited, "", 0, 0, why)]
    if "step_s" in one:
        why = "host and GPU work side by side: equal to the step's where the host limits it"
        made += [
            Measure(f"{name}: time of a step", one["step_s"] * 1e3, "ms"),
            Measure(f"{name}: of it issuing by the host", one["issue_s"] * 1e3, "ms", why=why),
            Measure(f"{name}: images", one["images_per_s"], "images/s"),
            _waiting(f"{name}: waiting for data", one["data_wait_share"], on_gpu),
        ]
    return made


def _waiting(name: str, share: float, on_gpu: bool) -> Measure:
    why = "chosen: the data lie on the GPU, and no copy waits"
    return Measure(name, share, "of the time", None, _WAIT_SHARE if on_gpu else None, why)


def tests(folder: Path) -> list[Measure]:
    """Return how many tests there were on the device, and how many failed."""
    suite = next(iter(ElementTree.parse(folder / "junit.xml").getroot().iter("testsuite")))
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    ran = count["tests"] - count["skipped"]
    return [
        Measure("tests that ran", ran, "", 1, None, "others need more GPUs, or are skipped"),
        Measure("tests that failed", bad, "", 0, 0),
    ]


def preflight(folder: Path) -> list[Measure]:
    """Return the faults and notes of the preflight, and its busbw."""
    said = [x for x in (folder / "log.txt").read_text().splitlines() if x.startswith('{"ok"')]
    report = json.loads(said[-1])
    notes = [note for check in report["checks"] for note in check["notes"]]
    faults = len(report["faults"])
    made = [Measure("faults of the preflight", faults, "", 0, 0, _first(report["faults"]))]
    return [*made, Measure("notes of the preflight", len(notes), why="; ".join(notes)[:600])]


def _first(faults: list[dict[str, str]]) -> str:
    return "; ".join(f"{f['check']}: {f['what']}" for f in faults)[:600]


def verify(folder: Path) -> list[Measure]:
    """Return how many cases were over their tolerance: ranks on the CPU of this machine."""
    text = (folder / "log.txt").read_text()
    # Warnings of torch begin with a bracket too.
    found = json.loads(text[text.rindex("\n[\n") :].partition("\n]")[0] + "\n]")
    over = sum(not one["ok"] for one in found)
    return [Measure("cases of verify over the tolerance", over, f"of {len(found)}", 0, 0)]


def comm(folder: Path) -> list[Measure]:
    """Return wrong results, the busbw of the largest all_reduce, and times in a row."""
    with (folder / "run" / "comm.csv").open() as file:
        rows = list(csv.DictReader(file))
    wrong = sum(row["correct"].lower() not in ("true", "1") for row in rows)
    reduced = [row for row in rows if row["operation"] == "all_reduce"]
    made = [Measure("wrong results of collectives", wrong, f"of {len(rows)}", 0, 0)]
    largest = max(reduced, key=lambda row: int(row["bytes"]))
    busbw = float(largest["bus_gb_per_s"])
    made.append(expected.all_reduce(busbw, gpu_of(folder), link_of(folder)))
    small = [r for r in reduced if int(r["bytes"]) <= _SMALL_BYTES and r.get("pipelined_time_s")]
    if small:
        row = small[0]
        share = float(row["pipelined_time_s"]) / float(row["time_s"])
        why = "one of several in a row does not wait for the host"
        name = f"all_reduce of {row['bytes']} bytes: time in a row / time alone"
        made.append(Measure(name, share, "", None, 1.0, why))
    return made


def records(run: Path) -> list[Record]:
    """Return the records of a run's first attempt."""
    with RunPaths(run).metrics(0).open("rb") as stream:
        return [one for one in read_file(stream) if isinstance(one, dict)]


def train(folder: Path) -> list[Measure]:
    """Return rates and waits of the trainings, and whether two of them have the same losses."""
    made, losses = [], {}
    for run in sorted(path for path in folder.iterdir() if (path / "metrics").is_dir()):
        found = records(run)
        epochs = [one for one in found if one["kind"] == "epoch"]
        on_gpu = any(one.get("device_type") == "cuda" for one in found)
        last = epochs[-1]
        share = last["data_wait_s"] / last["epoch_time_s"]
        made.append(Measure(f"{run.name}: rate", last["images_per_s"], "images/s"))
        made.append(_waiting(f"{run.name}: waiting for data", share, on_gpu))
        losses[run.name] = [one["train_loss"] for one in epochs]
    same = {name: values for name, values in losses.items() if name.startswith("same-bits")}
    if len(same) > 1:
        different = sum(values != next(iter(same.values())) for values in same.values())
        why = "two runs with --deterministic on the same GPUs"
        made.append(Measure("runs with other losses", different, f"of {len(same)}", 0, 0, why))
    return [*made, contexts(folder)]


def contexts(folder: Path) -> Measure:
    """Return how many processes were on several GPUs: each rank has a context on its own only."""
    name, seen = "processes on more than one GPU", defaultdict(set)
    try:
        lines = (folder / PROCESSES).read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        pid, _, uuid = line.partition(", ")
        if pid.isdigit() and uuid:
            seen[pid].add(uuid)
    if not seen:
        return Measure(name, None, why="nvidia-smi lists no processes (as in a container)")
    many = sum(len(uuids) > 1 for uuids in seen.values())
    why = "a context on another rank's GPU takes half a GB of it"
    return Measure(name, many, f"of {len(seen)}", 0, 0, why)


def study(folder: Path) -> list[Measure]:
    """Return how many runs of the study were not ok, and the efficiency of each series."""
    own = folder / "logs" / "gpu-check"
    runs, sizes = (_rows(own / name) for name in ("results.csv", "scaling.csv"))
    bad = [row["run_id"] for row in runs if row["status"] != "ok"]
    made = [Measure("runs that are not ok", len(bad), f"of {len(runs)}", 0, 0, ", ".join(bad))]
    made.append(Measure("reports", float((own / "report.html").exists()), "", 1, 1))
    why = "no bound: the demo's model is so small that the host limits it"
    for row in sizes:
        if row["efficiency"]:
            name = f"{row['series']} at {row['world_size']}: efficiency"
            made.append(Measure(name, float(row["efficiency"]), why=why))
    return made


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def drill(folder: Path) -> list[Measure]:
    """Return how many runs did not recover from their fault with the same bits."""
    rows = _rows(folder / "logs" / "drill" / "drill.csv")
    return [
        Measure("faults injected", len(rows), "", 1),
        _counted("final status not ok", rows, "final_status", "ok"),
        _counted("parameters not bitwise equal", rows, "same_parameters", "yes"),
    ]


def _counted(name: str, rows: Iterable[dict[str, str]], column: str, right: str) -> Measure:
    wrong = [row["fault"] for row in rows if row[column].lower() != right.lower()]
    return Measure(name, len(wrong), "", 0, 0, ", ".join(wrong))
