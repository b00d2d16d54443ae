"""A trained model's inference: eager, torch.compile, AOTInductor from C++, ONNX Runtime.

    python tests/bench/inference.py [RUN] [--rounds 3]

RUN: a run's folder with a checkpoint; without it the default CNN is trained for a few steps.
RUN/export/aoti and RUN/export/onnx are made where they are absent, and hpc/inference is built. The
ways alternate in every round; a time is the best of all iterations, beside their median.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench import ENV, LESS, ROOT, Figures, report

BATCHES, THREADS = (1, 64, 1024), (1, 2)
Times = dict[str, list[float]]  # seconds of an iteration, by "way batch"


def iterations(batch: int) -> int:
    """How often a batch is measured in a round."""
    return {1: 200, 64: 20}.get(batch, 4)


def timed(call: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each call, after three that do not count."""
    found = []
    for i in range(3 + count):
        begin = time.perf_counter()
        call()
        if i >= 3:
            found.append(time.perf_counter() - begin)
    return found


def of_program(infer: Path, run: Path, batch: int, threads: int) -> list[float]:
    """Seconds of each iteration of the C++ program."""
    words = ["--batch", str(batch), "--threads", str(threads)]
    words += ["--iterations", str(iterations(batch))]
    out = subprocess.check_output([infer, run / "export/aoti", *words], text=True)
    return [float(ms) / 1e3 for ms in re.findall(r"step_time_ms=(\S+)", out)]


def measure(run: Path, infer: Path, threads: int, rounds: int) -> Times:
    """All ways at one number of threads, in this process and in the C++ program."""
    import onnxruntime
    import torch

    from jobkit.export.formats import Deployed
    from jobkit.export.weights import trained_model

    torch.set_num_threads(threads)
    model = Deployed(trained_model(run, None, print).model).eval()
    compiled = torch.compile(model, dynamic=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(
        str(run / "export/onnx/model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    found: Times = {}
    with torch.inference_mode():
        compiled(torch.zeros(8, 3, 32, 32))
        for batch in BATCHES * rounds:
            x, count = torch.randint(0, 256, (batch, 3, 32, 32)).float(), iterations(batch)
            feed = {"pixels": x.numpy()}
            for way, times in (
                ("eager", timed(lambda x=x: model(x), count)),
                ("torch.compile", timed(lambda x=x: compiled(x), count)),
                ("ONNX Runtime", timed(lambda feed=feed: session.run(None, feed), count)),
                ("AOTInductor, C++", of_program(infer, run, batch, threads)),
            ):
                found.setdefault(f"{way}|{batch}", []).extend(times)
    return found


def trained(folder: Path) -> Path:
    """A run of the default CNN with a checkpoint."""
    words = ["--run-dir", folder, "--strategy", "single", "--device", "cpu", "--epochs", "1"]
    words += ["--dataset", "synthetic", "--train-samples", "1024", "--test-samples", "64"]
    words += ["--checkpoint-every", "epoch", "--breakdown-iterations", "0", "--data-dir"]
    subprocess.check_call(["bash", "run.sh", *words, folder.parent], cwd=ROOT, env=ENV, stdout=-3)
    return folder


def prepare(run: Path, place: Path) -> Path:
    """Export and build what is absent; return the program."""
    for to in ("aoti", "onnx"):
        if not (run / "export" / to).exists():
            subprocess.check_call(
                [sys.executable, "-m", "jobkit", "export", run, "--to", to], env=ENV
            )
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    subprocess.check_call(["cmake", "-S", ROOT / "hpc/inference", "-B", place, python])
    subprocess.check_call(["cmake", "--build", place])
    return place / "infer"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--infer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help="of one process, which starts the others")
    args = parser.parse_args()
    if args.threads:
        print(json.dumps(measure(args.run, args.infer, args.threads, args.rounds)))
        return 0
    figures = Figures()
    with tempfile.TemporaryDirectory() as place:
        run = args.run or trained(Path(place) / "bench" / "run")
        infer = prepare(run, Path(place) / "build")
        for threads in THREADS:
            words = [sys.executable, __file__, run, "--rounds", str(args.rounds)]
            words += ["--infer", infer, "--threads", str(threads)]
            env = {**ENV, "OMP_NUM_THREADS": str(threads)}
            out = subprocess.check_output(words, env=env, text=True)
            for key, times in json.loads(out.splitlines()[-1]).items():
                way, batch = key.split("|")
                best, mid = min(times) * 1e3, median(times) * 1e3
                name = f"{way}, {threads} threads, batch {batch}, ms"
                figures[name] = best, LESS
                print(f"{name}: {best:.2f} ({mid:.2f})", flush=True)
    return report(figures)


if __name__ == "__main__":
    sys.exit(main())
