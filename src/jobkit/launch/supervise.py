"""Starts the ranks of one run, and stays with them to their end: run.sh becomes this program.

In an allocation of Slurm srun starts the ranks. Elsewhere torchrun starts those of jobkit's own
training, and this process those of a command. From top to bottom: an attempt begins, is followed,
and is judged; then another one begins, or the job is requeued. Standard library of Python 3.10.
"""

import contextlib
import importlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobkit.errors import Exit, NotStarted, UsageError, command, one_line
from jobkit.files import file_names, read_regular
from jobkit.launch import start
from jobkit.launch.command import leave_spec
from jobkit.launch.start import MAX_RESTARTS, NO_CRASH, Run, say
from jobkit.launch.together import Watch
from jobkit.outcome import slurm_jobs
from jobkit.paths import logs_root, read_json, write_json, write_whole
from jobkit.permissions import check_study, other_writers
from jobkit.processes import (
    END_SIGNALS,
    Children,
    Signals,
    adopt_orphans,
    catches,
    children_of,
    end_descendants,
    identify,
    process_start,
)
from jobkit.spec.command import CommandSpec

TERM_GRACE_S = 20.0  # in an allocation, where Slurm sends TERM to the ranks itself
STUCK_AFTER_S, LOOK_EVERY_S = 90.0, 5.0  # srun's own --wait, of 60 s, comes first
OUTCOME_S = 30.0  # for the outcome that rank 0 writes on another machine
MIN_CORES_PER_GPU = 4
NEVER = float("inf")
NOW = "%Y-%m-%dT%H:%M:%S%z"  # of strftime


# --- an attempt begins ----------------------------------------------------------------------------


def choose_folder(run: Run, in_study: bool) -> None:
    """The run's folder; a new one where nobody asked for one.

    Raises UsageError where others may put another folder in its place: jobs would run what it has.
    """
    if path := run.options.get("run-dir"):
        run.folder = Path(path).absolute()
    else:
        new = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        name = f"job-{os.environ['SLURM_JOB_ID']}" if run.allocation else new
        kind = "comm" if "comm" in run.options else "single"
        run.folder, run.new_folder = logs_root().absolute() / kind / name, True
    if in_study:  # its launcher has looked
        return
    for note in check_study(run.folder):
        say("note", note)
    if other_writers(run.folder.parent).startswith("its owner"):
        raise UsageError(f"{run.folder.parent} is another user's: choose other logs (JOBKIT_LOGS)")


def claim_attempt(run: Run, signals: Signals) -> None:
    """Make the folder of the next attempt, which claims its number: no two starts share one."""
    attempts = run.paths.attempts
    if attempts.is_symlink():
        raise UsageError(f"{attempts} is a link, through which would be written: remove it")
    try:
        attempts.mkdir(parents=True, exist_ok=True)
        run.attempt = join_attempt(run, signals) if run.machine else 0
        while not run.machine:
            with contextlib.suppress(FileExistsError):
                (attempts / str(run.attempt)).mkdir()
                break
            run.attempt += 1
    except OSError:
        raise UsageError(f"{run.folder} is not writable: choose another with --run-dir") from None
    where = f"{run.folder} on {socket.gethostname()} at {time.strftime(NOW)}"
    print(f"[jobkit] start: attempt {run.attempt} of {where}", flush=True)


def join_attempt(run: Run, signals: Signals) -> int:
    """On machine K: the attempt that machine 0 has begun, and in which this machine is not yet."""
    wait_s, begin = int(run.options.get("start-timeout", 60)), time.monotonic()
    while time.monotonic() < begin + wait_s:
        numbers = [int(n) for n in file_names(run.paths.attempts) if re.fullmatch("[0-9]{1,6}", n)]
        folder = run.paths.attempts / str(max(numbers, default=0))
        outcome = read_json(folder / "outcome.json") or {}
        # One that has ended well is of a program that waits for nobody, and was quick.
        if numbers and (not (folder / "ended").exists() or outcome.get("status") == "ok"):
            with contextlib.suppress(FileExistsError):
                (folder / f"machine-{run.machine}").touch(exist_ok=False)
                return max(numbers)
        if any(signum in END_SIGNALS for signum in signals.wait(0.2)):
            sys.exit(Exit.TERMINATED)
    what = f"machine 0 has begun no attempt in {run.folder} within {wait_s} s"
    raise NotStarted(f"{what}: all machines need this folder")


def start_attempt(run: Run) -> tuple[Children, socket.socket | None]:
    """Start the ranks, or what starts them; the socket holds their port."""
    env = dict(os.environ)
    words = [*run.training]
    if run.command:
        env = start.command_environment(run, env)
    elif not run.only:
        words += ["--run-dir", str(run.folder), "--attempt", str(run.attempt)]
    if not run.allocation:
        return start_here(run, env, words)
    env = start.step_environment(env, run.launcher in ("torchrun", "once"))
    if run.launcher in ("srun", "torchrun"):
        env.setdefault("MASTER_PORT", str(start.step_port()))
        env["LOCAL_WORLD_SIZE"] = str(run.ranks)
    words = [run.module, *words]
    line = start.srun_command(run, env) if run.command else start.srun_training(run, env, words)
    children = Children(grace_s=10.0)
    children.start(line, env, session=False)
    return children, None


def start_here(
    run: Run, env: dict[str, str], words: list[str]
) -> tuple[Children, socket.socket | None]:
    """Start torchrun on this machine, or a command's ranks."""
    by_torchrun, options = run.launcher in ("torchrun", "training"), run.options
    grace = options.get("shutdown-timeout", "30" if by_torchrun else "15")
    if "shutdown-timeout" in options:
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = grace
    if not env.get("OMP_NUM_THREADS"):  # torchrun would set 1, and warn
        env["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // run.ranks))
    if not run.command:
        if run.only:  # there is no outcome to read
            handle, name = tempfile.mkstemp(prefix="jobkit-refused-")
            os.close(handle)
            run.refusal = Path(name)
        env["JOBKIT_READS_OUTCOME"] = str(run.refusal or 1)
    if run.nodes == 1 and sys.platform == "linux":  # a host name may resolve to no address
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Bound, and not listening: no other program gets the port until torch binds it seconds later,
    # which SO_REUSEADDR of both sockets allows.
    holder, port = None, int(options.get("master-port", 29500))
    if "nnodes" not in options and not by_torchrun and env.get("MASTER_PORT"):
        port = int(env["MASTER_PORT"])
    elif "nnodes" not in options:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
    if by_torchrun:  # it kills its ranks itself after the grace period
        children = Children(float(grace) + 5)
        env = {k: v for k, v in env.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
        children.start(start.torchrun_here(run, port, words), env)
        return children, holder
    children, once = Children(float(grace)), run.launcher == "once"
    for rank in range(1 if once else run.ranks):
        place = ["once"] if once else start.place_here(run, env, rank, port)
        words = [*start.rank_words(*place), *run.command]
        words.insert(1, "-p")  # run.sh has read BASH_ENV, before the site's set-up lines
        children.start(words, env, whole_lines=run.ranks > 1 and not once)
    return children, holder


# --- it is followed -------------------------------------------------------------------------------


def follow(run: Run, children: Children, signals: Signals) -> int:
    """Wait for the end of an attempt; return its exit code. Each signal is handed on once."""
    by_torchrun = not run.allocation and run.launcher in ("torchrun", "training")
    watch = Watch(run.folder) if run.command and run.launcher != "once" else None
    may_hang = run.allocation and not run.command and not run.only
    warned, end_at, next_look, done_at = 0, NEVER, 0.0, NEVER
    while not children.poll():
        for signum in signals.wait(0.25):
            if signum in END_SIGNALS and not run.stopped:
                run.stopped = 130 if signum == signal.SIGINT else int(Exit.TERMINATED)
                by_slurm = run.allocation and signum == signal.SIGTERM
                end_at = time.monotonic() + TERM_GRACE_S * by_slurm
            warned = signum if signum in (signal.SIGUSR1, signal.SIGUSR2) else warned
        now = time.monotonic()
        if now >= end_at:
            children.end()
        if warned:
            pids = [process.pid for process in children.processes]
            if by_torchrun:  # which would end of it: it is for its ranks
                pids = children_of(pids[0])
                trains = run.launcher == "training" and "comm" not in run.options
                if trains and not all(catches(pid, warned) for pid in pids):
                    pids = []  # a rank that is still starting would end of it
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, warned)
            warned = 0 if pids else warned  # they are not there yet
        if watch:
            watch.look()
        if may_hang and now >= next_look:
            next_look = now + LOOK_EVERY_S
            if done_at == NEVER and run.paths.outcome(run.attempt).exists():
                done_at = now
            if now - done_at > STUCK_AFTER_S:  # srun would wait to the time limit
                late = f"srun has not {STUCK_AFTER_S:g} s later (a node that it cannot reach?)"
                say("warning", f"the run has ended, and {late}: ending srun")
                children.kill()
                may_hang = False
    end_descendants(grace_s=children.grace_s)
    if run.job is not None:
        run.job["ranks_together"] = watch.found if watch else None
    return children.failed


# --- how it ended ---------------------------------------------------------------------------------


def read_note(path: Path) -> str | None:
    """What a small file says, as of a rank's end; None where there is none."""
    with contextlib.suppress(OSError):
        return read_regular(path, 1 << 16, follow=False).decode(errors="replace").strip()
    return None


def judge(run: Run, code: int) -> int:
    """The exit code of an attempt: what the run recorded says more than a launcher's code can."""
    if run.command:
        return judge_command(run, code)
    if run.only:
        return code
    path, deadline = run.paths.outcome(run.attempt), time.monotonic() + OUTCOME_S
    if run.machine and (not code or run.stopped):  # rank 0 may still write it
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    outcome = read_json(path) or {}
    recorded = outcome.get("exit_code")
    if type(recorded) is not int or not 0 <= recorded < 256:
        return code
    if code and recorded == 0:
        what = f"ended with code {code} after the run had recorded its success"
        say("warning", f"the launcher {what}: the results stand, the log says what crashed")
    elif recorded in (Exit.FAILED, Exit.THRESHOLD):  # below what torchrun or srun says of it
        say("error", f"the run failed: {one_line(str(outcome.get('reason')))}")
    return recorded


def judge_command(run: Run, code: int) -> int:
    """The exit code of a command's attempt, by what its ranks noted; writes outcome.json."""
    status, reason, folder = "ok", "", run.paths.attempts / str(run.attempt)
    failed, preempted = read_note(folder / "failed"), read_note(folder / "preempted")
    # A rank that was killed with its shell notes nothing: the others do, which had to end with it.
    if code == 137 and not run.allocation and (failed or "143 ").startswith("143 "):
        failed = "137 ended by SIGKILL"
        write_whole(folder / "failed", failed)  # for machine 0, where all may be well
    if failed is not None:
        match = re.fullmatch(r"([0-9]{1,3}) (.*)", failed, re.DOTALL)
        status, code, reason = "failed", 1, failed
        if match:
            code, reason = int(match[1]) or 1, match[2]
    elif preempted is not None and (code in (0, 75, 130, 143) or run.stopped):
        code, status, reason = int(Exit.AGAIN), "preempted", preempted
    elif code:
        status, reason = "failed", f"{run.launcher} ended with exit code {code}"
    if not run.machine:
        record = {"exit_code": code, "status": status, "reason": reason[:2000]}
        record |= {"run_id": run.folder.name, "attempt": run.attempt}
        write_json(run.paths.outcome(run.attempt), record)
    return code


# --- the job --------------------------------------------------------------------------------------


def note_job(run: Run, child: int | None = None) -> None:
    """Write job.json: with it others know how a run ended whose processes were killed.

    A folder that --run-dir names may be a study's: then only what a run.sh left is replaced.
    """
    path, environ, launcher = run.paths.job, os.environ, os.environ.get("JOBKIT_LAUNCHER")
    if run.job is None:
        by_run_sh = (read_json(path) or {}).get("launcher") == "run.sh"
        if not (launcher or run.new_folder or (by_run_sh and not run.machine)):
            return
        job_id, is_step = slurm_job_id(environ), bool(environ.get("SLURM_STEP_ID"))
        cluster = environ.get("SLURM_CLUSTER_NAME", "") if job_id and not launcher else ""
        is_job = environ.get("SLURM_TASK_PID") == str(os.getpid()) and not is_step
        run.job = {
            "v": 1,
            "launcher": launcher or "run.sh",
            "job_id": job_id,
            # Another cluster that sees this folder has other jobs of the same number.
            "cluster": cluster if re.fullmatch(r"[A-Za-z0-9._-]+", cluster) else None,
            # The allocation has more than this run.
            "shared": bool(job_id and not launcher and not is_job),
            **identify(os.getpid()),
            "host": environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "started": time.time(),
            "order": environ.get("JOBKIT_ORDER"),
            "ended": None,
            "exit_code": None,
            "first_attempt": run.attempt,
            "command": ["bash", str(run.run_sh), *run.words],
            "child": None,
        }
    if child and not run.allocation:  # it goes on where this process is killed; Slurm ends its own
        run.job["child"] = {"pid": child, "pid_start": process_start(child)}
    write_json(path, run.job)


def slurm_job_id(environ: Mapping[str, str]) -> str | None:
    """The job's id as sacct shows it: 17, or 17_0 for an element of an array."""
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID") or None


def prepare_allocation(run: Run) -> None:
    """Set what the ranks are told of the allocation."""
    environ, job_id = os.environ, os.environ["SLURM_JOB_ID"]
    if cores := environ.get("SLURM_CPUS_PER_TASK"):
        # Nodes that are simulated have more cores than their machine.
        environ.setdefault("OMP_NUM_THREADS", str(min(int(cores), os.cpu_count() or 1)))
    on_node = re.match(r"[0-9]+", environ.get("SLURM_CPUS_ON_NODE", ""))
    share = int(cores or (int(on_node[0]) // run.ranks if on_node else MIN_CORES_PER_GPU))
    if run.command and environ.get("SLURM_GPUS_ON_NODE") and share < MIN_CORES_PER_GPU:
        text = f"{share} core{'s' * (share != 1)} for each rank on a GPU: ask for more"
        say("warning", f"{text}, as sbatch --cpus-per-task=8 run.sh")
    shown = slurm_jobs.output(["squeue", "-h", "-j", job_id, "-o", "%A|%h"]) or ""
    # A node's counter of energy counts what every job there uses: the ranks read it where no other
    # job can be, which they cannot see. Of an array's last element squeue shows all elements.
    environ.pop("JOBKIT_NODE_ALONE", None)
    if f"{job_id}|NO" in shown.split():
        environ["JOBKIT_NODE_ALONE"] = "1"


def note_first(run: Run) -> None:
    """Note the job's first attempt: with it the restarts are bounded, also after a requeue."""
    path, job_id = run.paths.attempts / "first", os.environ["SLURM_JOB_ID"]
    match = re.fullmatch(r"(\S+) ([0-9]{1,6})", read_note(path) or "")
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) and match and match[1] == job_id:
        run.first = int(match[2])
    write_whole(path, f"{job_id} {run.first}\n")


def check_preflight(run: Run) -> int:
    """Check the allocation on every rank; return 5 where a check fails."""
    env = start.step_environment({**os.environ, "JOBKIT_PREFLIGHT_SECRET": os.urandom(16).hex()})
    words = ["jobkit.checks.preflight.cli", *([] if run.only else ["--run-dir", str(run.folder)])]
    words += ["--dataset", "synthetic"] if run.command else run.training  # its data are its own
    if subprocess.run(start.srun_training(run, env, words), env=env).returncode == 0:
        return Exit.OK
    say("error", "preflight failed: nothing was trained")
    return Exit.PREFLIGHT


def requeue(run: Run) -> None:
    """Requeue a job that was stopped early with a checkpoint, within its bound."""
    marks = [run.paths.attempts / str(n) / "requeued" for n in range(run.first, run.attempt + 1)]
    # Slurm requeues by itself too, as after the failure of a node.
    count, limit = sum(map(Path.exists, marks)), run.options.get("max-restarts")
    if count >= int(limit or MAX_RESTARTS):
        already = f"requeued {count} times already (--max-restarts)"
        say("warning", f"stopped early, and {already}: not again")
        return
    job_id = os.environ["SLURM_JOB_ID"]
    marks[-1].touch()
    text = f"requeueing job {job_id} at {time.strftime(NOW)}"
    print(f"[jobkit] stopped early with a checkpoint: {text}", flush=True)
    # An array's last element has the job id of the array, which would requeue all of it.
    if subprocess.run(["scontrol", "requeue", slurm_job_id(os.environ) or job_id]).returncode:
        say("warning", f"Slurm did not requeue: submit it again with --run-dir {run.folder}")


def run_attempts(run: Run, signals: Signals) -> int:
    """Run attempt after attempt, as far as another one may help; return the exit code."""
    limit = int(run.options.get("max-restarts", 0))
    while True:
        children, holder = start_attempt(run)
        if not run.only:
            note_job(run, children.processes[0].pid)
        code = follow(run, children, signals)
        if holder:
            holder.close()
        if run.refusal:
            code = Exit.USAGE if read_note(run.refusal) else code
            run.refusal.unlink()
        if not run.stopped or run.command or os.environ.get("JOBKIT_POD"):
            code = judge(run, code)
        if run.nodes > 1 and not run.allocation and not run.machine and not run.only:
            (run.paths.attempts / str(run.attempt) / "ended").touch()
        if run.stopped:
            # A pod ends by TERM and may be replaced: its code says whether there is a checkpoint.
            of_a_pod = os.environ.get("JOBKIT_POD") and code in (Exit.OK, Exit.AGAIN)
            return code if of_a_pod else run.stopped
        number = run.attempt - run.first + 1
        warned = (run.paths.attempts / str(run.attempt) / "warned").exists()  # of a command
        again = (code not in NO_CRASH and not warned) or (code == Exit.AGAIN and not run.allocation)
        if run.only or not again or number > limit:
            return code
        text = f"starting the run again ({number} of {limit})"
        say("warning", f"attempt {run.attempt} ended with code {code}: {text}")
        claim_attempt(run, signals)


def check_settings(run: Run) -> int:
    """The exit code of the training's own check of its settings, which imports no torch."""
    words = [*run.training, f"--check={run.nodes}x{run.ranks}"]
    if folder := run.options.get("run-dir"):
        words += ["--run-dir", folder]
    try:
        return int(importlib.import_module(run.module).main(words))
    except SystemExit as end:  # argparse's way
        return int(end.code or 0)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run to the end; return the exit code of the run.

    argv: run.sh's path; how many options of srun and how many words before python the site has,
    each with these words behind it; and the words of run.sh.
    """
    signals = Signals()
    run = start.read_run(sys.argv[1:] if argv is None else argv)
    in_study = "JOBKIT_LAUNCHER" in os.environ
    if "help-training" in run.options:
        return check_settings(run)
    start.choose_python(run)
    if run.command and not run.allocation and shutil.which(run.command[0]) is None:
        raise UsageError(f"no command '{run.command[0]}' on {socket.gethostname()}")
    if not run.command and not in_study and (code := check_settings(run)):
        return code
    if run.command and run.only == "dry-run":
        total = run.nodes * run.ranks
        size = f"{total} rank{'s' * (total > 1)} on {run.nodes} node{'s' * (run.nodes > 1)}"
        print(f"{run.launcher}, {size}: {shlex.join(run.command)}")
    preflight = "preflight" in run.options and run.allocation
    if run.only == "check" or (run.command and run.only and not preflight):
        return Exit.OK
    if run.allocation:
        prepare_allocation(run)
    if not run.only:
        choose_folder(run, in_study)
        claim_attempt(run, signals)
        run.first = run.attempt
        if run.allocation:
            note_first(run)
        note_job(run)
        if run.command and not run.machine:  # a training leaves its own
            spec = CommandSpec(
                command=tuple(run.command), launcher=run.launcher, nodes=run.nodes,
                ranks_per_node=run.ranks,
            )  # fmt: skip
            leave_spec(run.paths, spec)
    os.environ.pop("JOBKIT_LAUNCHER", None)  # what the ranks start is no run of the study
    begun, code = time.monotonic(), check_preflight(run) if preflight else int(Exit.OK)
    if code == Exit.OK and not (run.only and run.command):
        adopt_orphans()
        code = run_attempts(run, signals)
    if run.job is not None:
        took_s = round(time.monotonic() - begun, 3)
        end = {"ended": time.time(), "elapsed_s": took_s, "exit_code": code}
        write_json(run.paths.job, {**run.job, **end})
    if code == Exit.AGAIN and run.allocation and not run.stopped:
        requeue(run)
    if code == Exit.USAGE and run.new_folder and not run.paths.spec.exists():
        shutil.rmtree(run.folder)  # bad input leaves nothing in a folder that nobody asked for
    return code
