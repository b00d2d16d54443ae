"""Nine kinds of programs, each at three sizes, started by srun and by torchrun: what comes of each.

    python tests/bench/programs.py             on a minicluster: 1, 2 and 2x2 ranks
    python tests/bench/programs.py --local     on this machine, without Slurm: 1, 2 and 4 ranks

Each program goes through run_benchmarks.py and plot_results.sh to results.csv, figures and a
report; those that stop are sent the stop signal once all ranks are at work. Prints a line for each
program and launcher, and what is not true in a report (tests/support/report_truth.py). Ends with 4
where something is not as it must be.
"""

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
from chaos import bring_up, door  # noqa: E402

from jobkit.analysis.collect.measured import WALL_TIME  # noqa: E402
from jobkit.analysis.tables.text import rounded  # noqa: E402
from jobkit.paths import RunPaths, read_json  # noqa: E402
from support.report_truth import untrue  # noqa: E402
from support.training_programs import PROGRAMS  # noqa: E402

LAUNCHERS = ("srun", "torchrun")
HEAD = 'command = ["{python}", "{folder}/train_{{kind}}.py"]\n'
STUDIES = {
    "train": HEAD,
    "prints": HEAD + 'pattern = "nanogpt"\nauto = false\n',
    "quiet": HEAD,
    "stopped": HEAD,
}
MORE = {"prints": '[work]\nunit = "tokens"\nper_step = 1000\nscaling = "strong"\n'}
KINDS = {
    "train": ("plain", "metered", "lightning", "transformers", "accelerate"),
    "prints": ("prints",),
    "quiet": ("silent", "crashes"),
    "stopped": ("stopped",),
}
SOURCES = dict.fromkeys(KINDS["train"], "auto") | {
    "metered": "meter",
    "stopped": "meter",
    "prints": "pattern nanogpt",
    "silent": WALL_TIME,
    "crashes": WALL_TIME,
}


class Stopper(threading.Thread):
    """Sends the stop signal to each run of a study whose ranks have all begun, once."""

    def __init__(self, folder: Path, env: dict[str, str], local: bool) -> None:
        super().__init__(daemon=True)
        self.folder, self.env, self.local = folder, env, local
        self.over = threading.Event()

    def run(self) -> None:
        done = set[Path]()
        while not self.over.wait(0.2):
            for spec in self.folder.glob("*/spec.json"):
                run, size = spec.parent, json.loads(spec.read_text())["spec"]
                ranks = size.get("nodes", 1) * size.get("ranks_per_node", 1)
                if run not in done and len(list(run.glob("ready-*"))) == ranks:
                    done.add(run)
                    self.stop(run)

    def stop(self, run: Path) -> None:
        if self.local:
            os.kill(run_sh(run), signal.SIGUSR2)
            return
        job_id = str(read_json(RunPaths(run).submission)["job_id"])
        subprocess.run(["scancel", "--signal=USR2", job_id], env=self.env, check=True)


def run_sh(run: Path) -> int:
    """The process of run.sh that a run on this machine has."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if any(w.endswith(b"run.sh") for w in words[:3]) and str(run).encode() in words:
            return int(folder.name)
    raise ProcessLookupError(f"no run.sh of {run}")


def study(folder: Path, name: str, launcher: str, sizes: list[int | str]) -> Path:
    """Write a study's file; return its path."""
    kinds = list(KINDS[name])
    text = f'name = "{launcher}-{name}"\nlauncher = "{launcher}"\ngpus = {json.dumps(sizes)}\n'
    text += STUDIES[name].format(python=sys.executable, folder=folder)
    text += f'[parameters]\nkind = "{kinds[0]}"\n[sweep]\nkind = {json.dumps(kinds)}\n'
    file = folder / f"{launcher}-{name}.toml"
    file.write_text(text + MORE.get(name, ""))
    return file


def run_study(file: Path, env: dict[str, str], local: bool) -> Path:
    """Run a study, and make its tables, figures and report; return its folder."""
    folder = Path(env["JOBKIT_LOGS"]) / file.stem
    words = ["--study", str(file), "--max-running", "1"]
    words += ["--site", "local", "--max-restarts", "1"] if local else ["--no-collect"]
    stopper = Stopper(folder, env, local)
    if file.stem.endswith("-stopped"):
        stopper.start()
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_benchmarks.py"), *words],
        env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    stopper.over.set()
    if done.returncode not in (0, 1):
        sys.exit(done.stdout + done.stderr)
    plot = [str(ROOT / "plot_results.sh"), str(folder)]
    done = subprocess.run(plot, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        sys.exit(done.stdout + done.stderr)
    return folder


def faults(rows: list[dict[str, str]]) -> list[str]:
    """The rows that are not as they must be."""
    wrong = []
    for row in rows:
        kind, ranks = row["kind"], int(row["world_size"])
        crashed = kind == "crashes" and ranks > 1
        seen = (row["status"], row["reason"] if crashed else row["throughput_source"])
        must = ("failed", "rank 1: exit code 3") if crashed else ("ok", SOURCES[kind])
        if seen != must or (kind == "stopped" and row["attempts"] != "2"):
            wrong.append(f"{kind} at {ranks}: {seen}, {row['attempts']} attempts, not {must}")
    return wrong


def shown(row: dict[str, str]) -> str:
    """A run in the table: its rate, or its status."""
    if row["status"] != "ok":
        return row["status"]
    return f"{rounded(float(row['throughput']))} {row['throughput_unit']}"


def report(folder: Path, launcher: str) -> list[str]:
    """Print the lines of a study's programs; return what is wrong."""
    with (folder / "results.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["world_size"]))
    by_kind = defaultdict[str, list[dict[str, str]]](list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    wrong = faults(rows)
    of_report = untrue(folder, every=True)
    for kind, own in by_kind.items():
        cells = [launcher, kind, *map(shown, own), SOURCES[kind].split(",")[0]]
        true = "all true" if not of_report else f"{len(of_report)} not true"
        print(f"| {' | '.join([*cells, true])} |", flush=True)
    return [f"{folder.name}: {text}" for text in wrong + of_report]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local", action="store_true", help="on this machine, without Slurm")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the studies there")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="programs", dir="/tmp"))
    base.chmod(0o755)
    own = {"JOBKIT_LOGS": str(base / "logs"), "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **own} if args.local else bring_up(base) | own
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = str(ROOT / "src")
    for name, text in PROGRAMS.items():
        (base / f"train_{name}.py").write_text(text)
    sizes: list[int | str] = [1, 2, 4] if args.local else [1, 2, "2x2"]
    print(f"| launcher | program | {' | '.join(map(str, sizes))} | rate from | report |")
    print(f"|---|---|{'---|' * (len(sizes) + 2)}", flush=True)
    begun, wrong = time.monotonic(), []
    try:
        for launcher in args.launchers:
            for name in args.only:
                file = study(base, name, launcher, sizes)
                wrong += report(run_study(file, env, args.local), launcher)
    finally:
        if not args.local:
            door(env, "down")
        if args.keep:
            shutil.copytree(base / "logs", args.keep, dirs_exist_ok=True)
        shutil.rmtree(base)
    print(f"\n{time.monotonic() - begun:.0f} s", *wrong, sep="\n")
    return 4 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
