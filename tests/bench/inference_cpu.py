"""CPU time of a batch of 1,024 images, on one thread: other load hardly changes it.

    OMP_NUM_THREADS=1 python tests/bench/inference_cpu.py RUN

RUN: a run's folder with a checkpoint and RUN/export/aoti. Two readings of each way, alternating.
"""

import resource
import sys
from pathlib import Path

import torch

from jobkit.export.formats import Deployed
from jobkit.export.weights import trained_model

CALLS = 4  # of one reading


def main(run: Path) -> None:
    """Print the mean of the calls of each reading."""
    torch.set_num_threads(1)
    model = Deployed(trained_model(run, None, print).model).eval()
    ways = {
        "eager": model,
        "torch.compile": torch.compile(model, dynamic=True),
        "AOTInductor": torch._inductor.aoti_load_package(str(run / "export/aoti/model.pt2")),
    }
    pixels = torch.randint(0, 256, (1024, 3, 32, 32)).float()
    with torch.inference_mode():
        for call in ways.values():
            for batch in (8, 1024, 1024, 1024):  # compiled at the first
                call(pixels[:batch])
        for way in list(ways) * 2:
            before = resource.getrusage(resource.RUSAGE_SELF)
            for _ in range(CALLS):
                ways[way](pixels)
            now = resource.getrusage(resource.RUSAGE_SELF)
            user_s, system_s = now.ru_utime - before.ru_utime, now.ru_stime - before.ru_stime
            faults = (now.ru_minflt - before.ru_minflt) / CALLS
            print(
                f"| {way} | {user_s / CALLS * 1e3:.0f} | {system_s / CALLS * 1e3:.0f} | "
                f"{faults:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
