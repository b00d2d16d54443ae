"""Run all checks that need GPUs, and pack what they found into one file: `make gpu-check`.

    python -m jobkit gpu-check                 on a machine with GPUs, in about ten minutes
    python -m jobkit gpu-check --device cpu    rehearsal: the same commands, small, on the CPU

Each part has a time limit, and one that fails does not stop the next. No part needs a network.
"""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from jobkit.checks.gpu_check.parts import parts
from jobkit.checks.gpu_check.report import is_bad, write
from jobkit.checks.gpu_check.results import GPU_LISTING
from jobkit.checks.gpu_check.runner import Result, run_part
from jobkit.checks.gpu_check.setting import Part, Setting, told
from jobkit.errors import Exit, Parser, UsageError, command, one_of
from jobkit.gpus import count_gpus
from jobkit.paths import REPOSITORY, logs_root, read_json

EPILOG = """examples:
  python -m jobkit gpu-check
  python -m jobkit gpu-check --parts step comm
  python -m jobkit gpu-check --device cpu
  python -m jobkit gpu-check --folder logs/gpu-check-node1-20260102-1200    resume that one

The last line names the file to send back. It has host names, addresses, versions and logs; of the
environment only the variables of NCCL, CUDA and the like.

exit codes: 0 no part failed; 2 wrong usage, or no GPU; 4 a part failed, or a number is outside of
its bounds; 130 interrupted
"""


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(prog="jobkit gpu-check", description=__doc__.splitlines()[0], epilog=EPILOG)
    made.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cuda, or cpu: a rehearsal of the commands, which measures no GPU (default: cuda)",
    )
    made.add_argument("--parts", nargs="+", metavar="NAME", help="only these parts (see --list)")
    made.add_argument("--list", action="store_true", help="list the parts and exit")
    made.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="folder (default: a new one in logs/); parts that have a result there are not run "
        "again",
    )
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, write the report and the archive; return the exit code."""
    args = parser().parse_args(argv)
    known = {part.name: part for part in parts()}
    for name in args.parts or ():
        one_of("part", name, known)
    if args.list:
        print("\n".join(f"{p.name:<10} at most {p.limit_s:>3} s: {p.text}" for p in known.values()))
        return Exit.OK
    gpus = 0 if args.device == "cpu" else count_gpus()
    if args.device == "cuda" and not gpus:
        raise UsageError(
            "no GPU is visible here (nvidia-smi, amd-smi and rocm-smi list none); "
            "gpu-check --device cpu rehearses the commands on the CPU"
        )
    setting = Setting(_folder(args.folder), args.device, gpus)
    chosen = [part for name, part in known.items() if name in (args.parts or known)]
    return _run(setting, chosen)


def _folder(given: Path | None) -> Path:
    if given is not None:
        if given.exists() and not given.is_dir():
            raise UsageError(f"--folder {given}: not a folder")
        return given.absolute()
    when = time.strftime("%Y%m%d-%H%M%S")
    return (logs_root() / f"gpu-check-{os.uname().nodename}-{when}").absolute()


def _run(setting: Setting, chosen: Sequence[Part]) -> int:
    """Run the parts one after the other; the report and the archive are there however it ends."""
    try:
        setting.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{setting.folder}: {error.strerror}") from None
    _keep(setting.folder / GPU_LISTING, ("nvidia-smi", "topo", "-m"))
    _keep(setting.folder / "nvidia-smi.txt", ("nvidia-smi",))
    results: list[Result] = []
    try:
        for at, part in enumerate(chosen, 1):
            print(f"{at}/{len(chosen)} {part.name}: {part.text} ...", flush=True)
            results.append(run_part(part, setting))
            end = results[-1]
            print(f"    {end.state} in {end.took_s:.0f} s {end.reason}".rstrip(), flush=True)
    except KeyboardInterrupt:
        print(f"interrupted; resume: python -m jobkit gpu-check --folder {setting.folder}")
        return Exit.INTERRUPTED
    finally:
        archive = write(setting, _about(setting), results)
        print(f"send back: {archive}", flush=True)
    return Exit.THRESHOLD if is_bad(results) else Exit.OK


def _keep(path: Path, words: Sequence[str]) -> None:
    """Keep what a command of the vendor says, where it is there."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=20)
        path.write_bytes(done.stdout)
    except (OSError, subprocess.TimeoutExpired):
        return


def _about(setting: Setting) -> dict[str, str]:
    """Return what the numbers depend on."""
    found = read_json(setting.folder / "step" / "step.json") or {}
    versions = found.get("versions", {})
    return {
        "device": str(found.get("device", "unknown")),
        "GPUs": str(setting.gpus),
        "ranks": str(setting.ranks),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": " ".join(os.uname()),
        "commit": _commit(),
        **{str(key): str(value) for key, value in versions.items()},
        **told(),
    }


def _commit() -> str:
    words = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
