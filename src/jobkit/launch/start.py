"""What starts the ranks of a run: run.sh's options, and the lines of srun and torchrun.

    python run.sh's words -> read_run() -> srun_training(), srun_command() or torchrun_here()

Standard library of Python 3.10, as supervise.py, which uses all of it.
"""

import contextlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.gpus import count_gpus
from jobkit.paths import REPOSITORY, RunPaths
from jobkit.spec.command import check_starter

COUNT = (r"[1-9][0-9]{0,5}", "a whole number, 1 or more")
NUMBER = (r"[0-9]{1,6}", "a whole number, 0 or more")
SECONDS = (r"(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,3})?", "a number of seconds, above 0")
ANY = (r"(?s:.*)", "")
# run.sh's options that have a value: a pattern for it, and the pattern in words.
OPTIONS = {
    "nproc-per-node": COUNT,
    "site": ANY,  # these two are read by run.sh
    "site-file": ANY,
    "nodes": COUNT,
    "ntasks-per-node": COUNT,
    "run-dir": ANY,
    "max-restarts": NUMBER,
    "monitor-interval": SECONDS,
    "start-timeout": COUNT,  # seconds
    "shutdown-timeout": COUNT,
    "nnodes": COUNT,
    "node-rank": NUMBER,
    "master-addr": (r"[A-Za-z0-9:][A-Za-z0-9._:%-]*", "the address of machine 0"),
    "master-port": (r"[1-9][0-9]{0,4}", "a port, 1 to 65535"),
    "launcher": (r"srun|torchrun|once", "srun, torchrun or once"),
    "unit": (r"[^\x00-\x1f\x7f]+", "text without a control character"),
    "work-per-step": (r"[0-9]+(\.[0-9]+)?([eE][+]?[0-9]{1,2})?", "a number above 0"),
    "warmup-steps": NUMBER,
    "why": (NUMBER[0], "a whole number of steps, 0 or more"),  # the training's as well
}
FLAGS = ("preflight", "comm", "no-auto", "help-training", "check", "dry-run")
OF_A_COMMAND = ("launcher", "unit", "work-per-step", "warmup-steps", "no-auto")
MEANT_RANKS = ("--nproc", "--np", "-np", "-n", "--ranks", "--gpus", "--gpu", "--num-gpus")
SLURM_BINDING = ("CPU_BIND", "CPU_BIND_LIST", "CPU_BIND_TYPE", "CPU_BIND_VERBOSE", "GPU_BIND")

MAX_RESTARTS = 3  # of a job that was stopped early with a checkpoint
WARNING_S = 60  # from the stop signal to the time limit
# Codes that another start would not mend: ok, bad input, a command that cannot be started or was
# not found, stopped early, and the end on request (HUP, INT, USR1, USR2, TERM).
NO_CRASH = (0, 2, 75, 126, 127, 129, 130, 138, 140, 143)


def say(kind: str, text: str) -> None:
    print(f"jobkit: {kind}: {text}", file=sys.stderr, flush=True)


# --- the options ----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Run:
    """One run: what is started, and what is known of it."""

    run_sh: Path
    srun_options: list[str]  # of the site, as a container's
    inside: list[str]  # the words before python in each task, as of a container
    words: list[str]  # the command line of run.sh
    options: dict[str, str]
    training: list[str]  # what the training gets
    command: list[str]  # or a command of the user's
    launcher: str  # of a command; training
    module: str  # of the training
    only: str  # check or dry-run: nothing is written
    allocation: bool
    python: str  # of the ranks
    nodes: int = 1
    ranks: int = 1  # on each node
    machine: int = 0  # the number of this machine, of several without Slurm
    folder: Path = Path()
    new_folder: bool = False  # nobody asked for one: a new one in logs/
    attempt: int = 0
    first: int = 0  # the attempt with which the job began, also before it was requeued
    stopped: int = 0  # the exit code of a signal that requested the end
    refusal: Path | None = None  # of a dry run: not empty once a rank has refused its settings
    job: dict[str, object] | None = None  # job.json, where it is this process's

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.folder)


def parse(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """run.sh's own options, in any order; the words for the training; and the command after --.

    Raises UsageError for a value that cannot be used.
    """
    options, training, rest = dict[str, str](), list[str](), list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in OPTIONS:
            if not equals and not rest:
                raise UsageError(f"--{name} needs a value")
            options[name] = value if equals else rest.pop(0)
            pattern, text = OPTIONS[name]
            if not re.fullmatch(pattern, options[name]):
                raise UsageError(f"--{name} {options[name]}: must be {text}")
        elif word.startswith("--") and name in FLAGS:
            if equals:
                raise UsageError(f"{word}: --{name} takes no value")
            options[name] = ""
        elif word.partition("=")[0] in MEANT_RANKS:
            number = value or (rest[0] if rest else "2")
            raise UsageError(f"unknown option {word}: write --nproc-per-node {number}")
        elif not training and not word.startswith("-"):
            line = shlex.join([word, *rest])
            raise UsageError(f"{line}: a command comes after --, as: bash run.sh -- {line}")
        else:
            training.append(word)
    if rest[:1] == ["--"] and not rest[1:]:
        raise UsageError("-- needs a command after it, as: -- python train.py")
    if rest and training:
        what = "after -- comes the command with its own options"
        raise UsageError(f"unknown option {training[0]}: {what}")
    return options, training, rest[1:]


def check_options(run: Run) -> None:
    """Raise UsageError for options that do not go together."""
    names, several = set(run.options), "nnodes" in run.options
    missing = {"node-rank", "master-addr", "run-dir"} - names
    machines, of_slurm = {"node-rank", "master-addr", "master-port"}, {"nodes", "ntasks-per-node"}
    listed = ", ".join(f"--{name}" for name in OF_A_COMMAND[:-1])
    for is_wrong, text in (
        (not run.command and names & {*OF_A_COMMAND},
         f"{listed} and --no-auto are of a command, which comes after --"),
        ("comm" in names and run.command, "--comm measures instead of a command: give one of them"),
        ({"comm", "preflight"} <= names, "--comm and --preflight: one after the other, not both"),
        ("work-per-step" in names and "unit" not in names,
         "--work-per-step needs --unit beside it, as --unit images"),
        ("nodes" in names and not of_slurm <= names, "--nodes needs --ntasks-per-node beside it"),
        (not several and names & machines,
         "--node-rank, --master-addr and --master-port need --nnodes beside them"),
        (several and missing, f"--nnodes needs --{max(missing, default='')} beside it"),
        (several and run.machine >= int(run.options["nnodes"]),
         f"--node-rank {run.machine}: must be below --nnodes"),
        (several and run.launcher == "once", "--launcher once starts all machines: no --nnodes"),
        (several and run.allocation,
         "--nnodes is for machines without Slurm: here srun starts all nodes"),
        (not run.allocation and names & of_slurm,
         "--nodes and --ntasks-per-node are for an allocation; here say --nproc-per-node"),
    ):  # fmt: skip
        if is_wrong:
            raise UsageError(text)


def read_run(argv: Sequence[str]) -> Run:
    """The run of a command line and of Slurm's variables. Raises UsageError for bad input."""
    run_sh, *rest = argv
    of_site = []
    for _ in range(2):
        count, *rest = rest
        of_site.append(rest[: int(count)])
        rest = rest[int(count) :]
    options, training, command = parse(rest)
    run = Run(
        run_sh=Path(run_sh), srun_options=of_site[0], inside=of_site[1], words=rest,
        options=options, training=training, command=command,
        only=next((name for name in ("check", "dry-run") if name in options), ""),
        launcher=options.get("launcher", "srun") if command else "training",
        module="jobkit.checks.comm" if "comm" in options else "jobkit.payload.main",
        machine=int(options.get("node-rank", 0)),
        allocation=bool(os.environ.get("SLURM_JOB_ID")),
        python=os.environ.get("JOBKIT_PYTHON") or "python",
    )  # fmt: skip
    check_options(run)
    run.training += [f"--why={why}"] if (why := options.get("why")) else []
    run.training += ["--dry-run"] if "dry-run" in options else []
    if "help-training" in options:
        run.training = ["--help"]
    elif run.allocation:
        if "nproc-per-node" in options:
            text = "has no effect in an allocation: srun starts the tasks that were asked for"
            say("warning", f"--nproc-per-node {text}")
        run.nodes = int(options.get("nodes") or os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        tasks = int(os.environ.get("SLURM_NTASKS") or run.nodes)
        per_node = options.get("ntasks-per-node")
        # sbatch --ntasks says how many there are, beside which run.sh's header is a bound. A step,
        # as an interactive shell, has a number of its own.
        if not os.environ.get("SLURM_NTASKS") or os.environ.get("SLURM_STEP_ID"):
            per_node = per_node or os.environ.get("SLURM_NTASKS_PER_NODE")
        if not per_node and tasks % run.nodes:
            advice = "give --nodes and --ntasks-per-node, and not --ntasks"
            raise UsageError(f"{tasks} tasks on {run.nodes} nodes: {advice}")
        run.ranks = int(per_node or tasks // run.nodes)
    else:
        run.nodes = int(options.get("nnodes", 1))
        gpus = count_gpus() if "nproc-per-node" not in options else 0
        run.ranks = int(options.get("nproc-per-node") or max(gpus, 2 if "comm" in options else 1))
    if command:
        check_starter(command, run.launcher, run.nodes * run.ranks)
    return run


def choose_python(run: Run) -> None:
    """Take the checkout's own environment where the Python on PATH has no torch.

    Of a container and of a command nothing is known here. Raises UsageError where none has it.
    """
    path, root = shutil.which(run.python), run.run_sh.parent
    if run.command or run.inside or run.srun_options or (path and _has_torch(path)):
        return
    own_python = str(root / ".venv" / "bin" / "python")
    advice = "run 'make venv' once, then 'source .venv/bin/activate'"
    if root.name == "_kit":  # installed by pip
        own_python = sys.executable
        pip = "python -m pip install '/path/to/jobkit[payload]'"
        advice = f'run "{pip}", of a checkout or a wheel'
    if "JOBKIT_PYTHON" not in os.environ and _has_torch(own_python):
        say("note", f"no python on PATH that has torch: taking {own_python}")
        run.python = own_python
        return
    what = f"{path} has no torch and torchvision" if path else f"no '{run.python}' on PATH"
    raise UsageError(f"{what}: {advice}")


def _has_torch(python: str) -> bool:
    """Whether there is this Python with torch and torchvision, which it does not import."""
    text = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    words = [python, "-c", text, "torch", "torchvision"]
    return Path(python).exists() and subprocess.run(words).returncode == 0


# --- the lines of srun and torchrun ---------------------------------------------------------------


def step_environment(env: dict[str, str], whole_node: bool = False) -> dict[str, str]:
    """What srun must not inherit: options of the job that contradict those that it gets.

    A step that asks for no GPUs has all of its job, and shows each rank all of its node: NCCL then
    copies by NVLink, and the ranks take theirs by local rank. run.sh's header asks for 4 on a node,
    whatever sbatch's --gres said.
    """
    # EXPORT_ENV, of sbatch, would keep from the ranks what the site and run.sh have set.
    unwanted = {"SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_EXPORT_ENV"}
    unwanted |= {f"SLURM_GPUS{of}" for of in ("", "_PER_NODE", "_PER_SOCKET", "_PER_TASK")}
    if whole_node:
        unwanted |= {"SLURM_CPUS_PER_TASK"}
    if env.get("SLURM_STEP_ID"):  # an interactive shell is a step, whose binding is its own
        unwanted |= {f"SLURM_{name}" for name in SLURM_BINDING}
    return {name: value for name, value in env.items() if name not in unwanted}


def srun_line(
    run: Run, env: Mapping[str, str], words: list[str], size: tuple[int, int], *more: str
) -> list[str]:
    """srun, which starts these words as so many tasks on each of so many nodes: (nodes, tasks).

    It does not inherit cores. Without --kill-on-bad-exit the ranks that are left would wait
    forever. Never --unbuffered: srun then tears lines.
    """
    cpus = env.get("SLURM_CPUS_PER_TASK")
    start = ["srun", "--kill-on-bad-exit=1", *more]
    start += [f"--cpus-per-task={cpus}"] if cpus else []
    start += [f"--nodes={size[0]}", f"--ntasks={math.prod(size)}", f"--ntasks-per-node={size[1]}"]
    return [*start, *run.srun_options, *run.inside, *words]


def srun_training(run: Run, env: Mapping[str, str], words: list[str]) -> list[str]:
    """srun, which starts a module of jobkit as one task for each rank."""
    return srun_line(run, env, [run.python, "-m", *words], (run.nodes, run.ranks), "--wait=60")


def srun_command(run: Run, env: Mapping[str, str]) -> list[str]:
    """srun, which starts a command's ranks, one agent of torchrun on each node, or the command.

    A rank that has ended well leaves the others their time: --wait=0.
    """
    rank, size, more = rank_words("slurm"), (run.nodes, run.ranks), ["--wait=0"]
    if run.launcher == "torchrun":  # each node's one task has all that the node has
        text = Path(__file__).with_name("agent.py").read_text()
        rank = [_torchrun_python(run), "-c", text, str(run.ranks), *rank_words("torchrun")]
        size, more = (run.nodes, 1), [*more, "--cpu-bind=none"]
    elif run.launcher == "once":  # shared, so that the command may start steps of its own
        rank, size, more = rank_words("once"), (1, 1), [*more, "--cpu-bind=none", "--overlap"]
    return srun_line(run, env, [*rank, *run.command], size, *more)


def rank_words(*place: str) -> list[str]:
    """The words that start one rank of a command: a shell's text, as a container has no jobkit."""
    return ["bash", "-c", (REPOSITORY / "hpc" / "rank.bash").read_text(), "jobkit", *place]


def _torchrun_python(run: Run) -> str:
    """The Python that the command itself names, else that of the ranks."""
    program = run.command[0] if run.command else ""
    return program if re.fullmatch(r"python[0-9.]*", Path(program).name) else run.python


def torchrun_here(run: Run, port: int, words: list[str]) -> list[str]:
    """torchrun on this machine, alone or as one of several.

    Its static rendezvous unpickles nothing; c10d's would take what any user of the machine sends.
    """
    options = run.options
    # In a folder that all share, machines in different attempts must not meet.
    name = f"jobkit.{run.attempt}" if run.nodes > 1 else "jobkit"
    address = options.get("master-addr", "127.0.0.1")
    meet = ["--nnodes", str(run.nodes), "--node-rank", str(run.machine)]
    meet += ["--rdzv-backend", "static", "--master-addr", address, "--master-port", str(port)]
    meet += ["--rdzv-id", name, "--rdzv-conf", f"timeout={options.get('start-timeout', 60)}"]
    meet += [] if "nnodes" in options else ["--local-addr", "127.0.0.1"]
    start = [_torchrun_python(run), "-m", "torch.distributed.run", *meet]
    start += ["--nproc-per-node", str(run.ranks)]
    start += ["--monitor-interval", options.get("monitor-interval", "0.1")]
    if not run.command:
        return [*start, "-m", run.module, *words]
    # torchrun reads $$ as $, and $local_rank as a name of its own.
    ranks = [*rank_words("torchrun"), *run.command]
    return [*start, "--no-python", *(word.replace("$", "$$") for word in ranks)]


def step_port() -> int:
    """A port for a step's ranks, outside the range from which the system takes ports for itself."""
    low, high = 32768, 60999
    with contextlib.suppress(OSError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    count = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    seed = int(os.environ["SLURM_JOB_ID"]) * 31 + count * 7919 + os.getpid() * 101
    below, above = range(10000, max(low, 10000)), range(min(high, 65535) + 1, 65536)
    ports = below if len(below) >= len(above) else above
    return ports[seed % len(ports)] if ports else 29500


def command_environment(run: Run, env: dict[str, str]) -> dict[str, str]:
    """What a command gets besides the places of its ranks."""
    root = str(run.run_sh.parent / "src")
    auto = f"{root}/jobkit/program/auto"
    for name in ("JOBKIT_UNIT", "JOBKIT_WORK_PER_STEP", "JOBKIT_AUTO", "JOBKIT_READS_OUTCOME"):
        env.pop(name, None)
    for name in {"unit", "work-per-step"} & set(run.options):
        env[f"JOBKIT_{name.upper().replace('-', '_')}"] = run.options[name]
    env |= {"JOBKIT_RUN_DIR": str(run.folder), "JOBKIT_RUN_ID": run.folder.name}
    env |= {"JOBKIT_STUDY": run.folder.parent.name, "JOBKIT_ATTEMPT": str(run.attempt)}
    env |= {"JOBKIT_WARMUP_STEPS": run.options.get("warmup-steps", "5")}
    env["JOBKIT_WHY"] = run.options.get("why", "5")
    # The user's own folders stay first; jobkit, for its meter, comes last.
    parts = [p for p in env.get("PYTHONPATH", "").split(":") if p not in ("", root, auto)] + [root]
    if "no-auto" not in run.options:
        env["JOBKIT_AUTO"] = "1"
        parts[:0] = [auto] * Path(auto).is_dir()
    env["JOBKIT_PYTHONPATH"] = ":".join(parts)
    return env


def place_here(run: Run, env: Mapping[str, str], local_rank: int, port: int) -> list[str]:
    """The words for hpc/rank.bash of a rank that this process starts: torchrun's variables."""
    places = {"RANK": run.machine * run.ranks + local_rank, "LOCAL_RANK": local_rank}
    places |= {"NODE_RANK": run.machine, "WORLD_SIZE": run.nodes * run.ranks}
    places |= {"LOCAL_WORLD_SIZE": run.ranks, "MASTER_PORT": port}
    master = run.options.get("master-addr") or env.get("MASTER_ADDR") or "127.0.0.1"
    return ["here", f"MASTER_ADDR={master}", *(f"{name}={n}" for name, n in places.items())]
