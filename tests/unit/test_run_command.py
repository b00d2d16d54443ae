"""run.sh with a command: what its ranks get, where they run, signals, the end; srun is a stub."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.launch.start import step_port
from jobkit.outcome.state import run_state
from jobkit.paths import RunPaths
from support.place import ROOT
from support.stub_srun import JOB, RUN, SRUN, Kit

# In one write, as the stub of srun does not keep lines whole.
SHOW = """
import json, os, sys
os.write(1, json.dumps([os.environ.get(n) for n in sys.argv[1:]]).encode() + b"\\n")
"""


@pytest.fixture
def run(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def shown(run: Kit, *words: str, **env: str) -> list[list[str | None]]:
    """What each rank has in these variables, which are named after run.sh's own options."""
    options = [word for word in words if not word.isupper()]
    names = [word for word in words if word.isupper()]
    done = run(*options, "--", sys.executable, "-c", SHOW, *names, **env)
    return sorted(json.loads(line) for line in done.stdout.splitlines()[1:])


PLACES: dict[str, dict[str, str]] = {"here": {}, "slurm": JOB}
place = pytest.mark.parametrize("place", PLACES)
ODD = ["a b", "$HOME", "it's", 'say "hi"', "two\nlines", "", "*", "\\", "é", "--", "--help", "-x"]


@place
def test_the_command_arrives_whole_on_every_rank(run: Kit, place: str) -> None:
    show = "import os, sys; os.write(1, ascii(sys.argv[1:]).encode() + b'\\n')"
    two = [] if PLACES[place] else ["--nproc-per-node", "2"]
    done = run(*two, "--", sys.executable, "-c", show, *ODD, **PLACES[place])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [ascii(ODD)] * 2
    assert run.outcome() == {
        "exit_code": 0, "status": "ok", "reason": "", "run_id": run.run_dir.name, "attempt": 0,
    }  # fmt: skip
    spec = json.loads((run.run_dir / "spec.json").read_text())["spec"]
    assert spec["command"] == [sys.executable, "-c", show, *ODD]
    assert (spec["launcher"], spec["nodes"], spec["ranks_per_node"]) == ("srun", 1, 2)


def test_the_place_of_a_rank_comes_from_the_step(run: Kit) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"]
    assert shown(run, *names, **JOB) == [[r, r, "2", "2", "0", "nid007-ib"] for r in "01"]
    options = run.notes.read_text().splitlines()
    assert {"--kill-on-bad-exit=1", "--wait=0", "--ntasks=2", "--nodes=1"} <= set(options)


def test_few_cores_for_ranks_on_gpus_are_told(run: Kit) -> None:
    done = run("--", "true", **JOB, SLURM_GPUS_ON_NODE="2", SLURM_CPUS_ON_NODE="2")
    assert "1 core for each rank on a GPU: ask for more, as sbatch" in done.stderr


def test_the_port_is_of_the_job_and_outside_the_systems_range(run: Kit, monkeypatch) -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = set()
    for job, count in (("17", "0"), ("18", "0"), ("17", "1")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        ports.add(step_port())
    assert len(ports) == 3
    assert all(1023 < port < 65536 and not low <= port <= high for port in ports)
    assert shown(run, "MASTER_PORT", **JOB, MASTER_PORT="12345") == [["12345"]] * 2


@place
def test_what_a_program_is_told_of_its_run(run: Kit, place: str) -> None:
    names = ["JOBKIT_RUN_DIR", "JOBKIT_RUN_ID", "JOBKIT_STUDY", "JOBKIT_ATTEMPT", "JOBKIT_AUTO"]
    names += ["JOBKIT_UNIT", "JOBKIT_WORK_PER_STEP", "JOBKIT_WARMUP_STEPS", "JOBKIT_WHY"]
    names += ["PYTHONSAFEPATH"]
    said = ["--unit", "kilo tokens", "--work-per-step", "1e3", "--warmup-steps", "7", "--why", "3"]
    env = {**PLACES[place], "JOBKIT_UNIT": "stale", "PYTHONPATH": "/of the user:/b"}
    ids = [str(run.run_dir), run.run_dir.name, run.folder.name]
    told = [*ids, "0", "1", "kilo tokens", "1e3", "7", "3", None]
    assert shown(run, *said, *names, **env)[0] == told
    bare = [*ids, "1", None, None, None, "5", "5", None]
    assert shown(run, "--no-auto", *names, **env)[0] == bare
    assert shown(run, "--no-auto", "PYTHONPATH", **env)[0] == [f"/of the user:/b:{ROOT}/src"]


STOPPED = "rank 1: ended by the stop signal, SIGUSR2, which the command does not handle"


@place
def test_how_a_rank_ended_is_told(run: Kit, place: str) -> None:
    two = [] if PLACES[place] else ["--nproc-per-node", "2"]
    for number, (code, exits, status, reason) in enumerate((
        ("3", 3, "failed", "rank 1: exit code 3"),
        ("75", 75, "preempted", "rank 1: exit code 75"),
        ("os.kill(os.getpid(), 9)", 137, "failed", "rank 1: ended by SIGKILL"),
        ("os.kill(os.getpid(), 12)", 140, "failed", STOPPED),
    )):  # fmt: skip
        text = f"import os, sys; sys.exit({code} if os.environ['RANK'] == '1' else 0)"
        done = run(*two, "--max-restarts", "0", "--", sys.executable, "-c", text, **PLACES[place])
        assert done.returncode == exits, done.stderr
        outcome = run.outcome(number)
        assert [outcome[k] for k in ("exit_code", "status", "reason")] == [exits, status, reason]


def test_a_shells_own_file_is_read_before_the_launch_alone(run: Kit) -> None:
    (run.folder / "env").write_text("N=$N+; export N\n")
    done = run("--nproc-per-node=1", "--", "sh", "-c", "echo $N", BASH_ENV=str(run.folder / "env"))
    assert "\n+\n" in done.stdout


@place
def test_a_crash_is_started_again_as_often_as_was_said(run: Kit, place: str) -> None:
    command = ["--max-restarts", "2", "--", "bash", "-c"]
    done = run(*command, "exit $((3 * (JOBKIT_ATTEMPT < 2)))", **PLACES[place])
    assert done.returncode == 0
    assert [run.outcome(n)["status"] for n in (0, 1, 2)] == ["failed", "failed", "ok"]
    done = run(*command, "exit 3", **PLACES[place])
    assert done.returncode == 3 and len(list((run.run_dir / "attempts").glob("[0-9]*"))) == 6
    assert "starting the run again (2 of 2)" in done.stderr


def test_the_bound_holds_over_requeues_of_the_job(run: Kit) -> None:
    command = ["--max-restarts", "2", "--", "bash", "-c"]
    assert run(*command, "exit 75", **JOB).returncode == 75
    assert "requeue 17" in run.notes.read_text()
    assert run(*command, "exit 3", **JOB, SLURM_RESTART_COUNT="1").returncode == 3
    assert len(list((run.run_dir / "attempts").glob("[0-9]*"))) == 3
    # Of another job, which was requeued before it began an attempt, all restarts are left.
    other = JOB | {"SLURM_JOB_ID": "18", "SLURM_RESTART_COUNT": "1"}
    assert run(*command, "exit 3", **other).returncode == 3
    assert len(list((run.run_dir / "attempts").glob("[0-9]*"))) == 6
    for count in "078":  # Slurm requeues by itself too, as after the failure of a node
        again = JOB | {"SLURM_JOB_ID": "19", "SLURM_RESTART_COUNT": count}
        done = run(*command, "exit 75", **again)
    assert run.notes.read_text().count("requeue 19") == 2
    assert "requeued 2 times already (--max-restarts): not again" in done.stderr


def test_a_command_that_a_node_does_not_have(run: Kit) -> None:
    done = run("--max-restarts", "2", "--", "no such\ncommand", **JOB)
    assert done.returncode == 127
    assert done.stderr.count("jobkit: error: no command $'no such\\ncommand' on ") == 1
    outcome = run.outcome()
    assert outcome["status"] == "failed" and "no command" in outcome["reason"]
    assert len(list((run.run_dir / "attempts").glob("[0-9]*"))) == 1
    # Where no folder was asked for, none is made.
    own = run.environ(JOBKIT_LOGS=str(run.folder / "logs"))
    words = ["bash", str(RUN), "--", "no-such-command"]
    done = subprocess.run(words, env=own, capture_output=True, text=True, cwd=run.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jobkit: error: no command 'no-such-command' on ")
    assert not (run.folder / "logs").exists()


def test_nohup_keeps_a_run_and_a_warning_reaches_it(run: Kit) -> None:
    text = "trap 'exit 75' USR2; echo ready; while :; do sleep 0.05; done"
    words = run.words("--nproc-per-node=1", "--", "bash", "-c", text)
    words = ["bash", "-c", 'trap "" HUP; exec "$@"', "-", *words]
    with subprocess.Popen(words, env=run.environ(), stdout=-1, text=True) as process:
        assert process.stdout and "ready\n" in process.stdout
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(300) == 75
    assert run_state(RunPaths(run.run_dir)).status == "preempted"


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 3), (signal.SIGUSR2, 3)]
)
def test_a_command_that_crashes_as_it_is_stopped_is_not_started_again(run, signum, code) -> None:
    text = "trap 'exit 3' TERM USR1 USR2; echo ready; while :; do sleep 0.05; done"
    with run.start("--nproc-per-node=1", "--max-restarts=2", "--", "bash", "-c", text) as process:
        assert process.stdout and "ready\n" in process.stdout
        process.send_signal(signum)
        assert process.wait(300) == code
    assert (run.outcome()["exit_code"], run_state(RunPaths(run.run_dir)).attempts) == (3, 1)


# Prints what it gets; the other warning ends it. It sleeps for moments, as a signal that comes just
# before Python's sleep begins is handled after it.
COUNTS = """
import os, signal, time
for name in ("USR2", "TERM"):
    signal.signal(signal.Signals["SIG" + name], lambda n, _: os.write(1, b"%d\\n" % n))
def end(*_):
    os.write(1, b"end\\n")
    os._exit(75)
signal.signal(signal.SIGUSR1, end)
os.write(1, b"ready %d\\n" % os.getpid())
while True:
    time.sleep(0.05)
"""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# Slurm with proctrack/cgroup signals the task alone, with proctrack/pgid its process group.
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["cgroup", "pgid"])
@pytest.mark.parametrize("launcher", ["srun", "once"])
def test_a_signal_of_the_step_reaches_the_command_once(run, launcher, send) -> None:
    one = {**JOB, "SLURM_NTASKS": "1"}
    run.tool("srun", SRUN.replace('"$@" &', 'setsid "$@" &'))
    command = [sys.executable, "-c", COUNTS]
    with run.start("--launcher", launcher, "--no-auto", "--", *command, **one) as process:
        assert process.stdout
        lines = (line for line in process.stdout if not line.startswith("[jobkit]"))
        ready, pid = next(lines).split()
        assert ready == "ready"
        task = parent(parent(int(pid)))
        for signum in (signal.SIGUSR2, signal.SIGTERM):
            send(task, signum)
            assert next(lines) == f"{signum.value}\n"
        # After whatever the shell still had to hand on.
        os.kill(task, signal.SIGUSR1)
        assert list(lines) == ["end\n"]
        assert process.wait(300) == 75
    assert run.outcome()["status"] == "preempted"


def test_a_dry_run_shows_the_command_and_starts_nothing(run: Kit) -> None:
    done = run("--dry-run", "--nproc-per-node=3", "--", "touch", "a b")
    assert (done.returncode, done.stdout) == (0, "srun, 3 ranks on 1 node: touch 'a b'\n")
    assert not run.run_dir.exists() and not (run.folder / "a b").exists()


# Ends as torchrun does once it has handed TERM on: by an exception, which names the signal.
TORCHRUN = """
import os, subprocess, sys
words = [w.replace("$$", "$") for w in sys.argv[sys.argv.index("--no-python") + 1 :]]
subprocess.run(words, env={**os.environ, "RANK": "0"})
raise type("SignalException", (Exception,), {"sigval": 15})
"""


def test_ranks_that_save_at_term_under_torchrun_are_preempted(run: Kit) -> None:
    fake = run.folder / "torch" / "distributed"
    fake.mkdir(parents=True)
    (fake / "run.py").write_text(TORCHRUN)
    for package in (fake, fake.parent):
        (package / "__init__.py").touch()
    env = {**JOB, "SLURM_NTASKS": "1", "PYTHONPATH": str(run.folder)}
    done = run("--launcher", "torchrun", "--no-auto", "--", "sh", "-c", "exit 75", **env)
    assert (done.returncode, "Traceback" in done.stderr) == (75, False), done.stderr
    assert run.outcome()["status"] == "preempted"


SAY = ["--", "bash", "-c", 'echo "rank $RANK of $WORLD_SIZE: $1"', "-", "a b"]


@pytest.mark.parametrize(("code", "dry"), [(0, []), (5, []), (0, ["--dry-run"])])
def test_a_preflight_comes_before_the_command(run: Kit, code: int, dry: list[str]) -> None:
    """It asks for no data of a training; a dry run only checks."""
    stub = run.tool("checking", f'#!/bin/sh\necho "python $*" >> "$NOTES"\nexit {code}\n')
    done = run("--preflight", *dry, *SAY, **JOB, JOBKIT_PYTHON=str(stub))
    assert done.returncode == code, done.stderr
    (asked,) = {x for x in run.notes.read_text().splitlines() if x.startswith("python")}
    assert asked.endswith(" --dataset synthetic")
    assert "-m jobkit.checks.preflight.cli" in asked
    assert done.stdout.count("of 2: a b") == (2 if not code and not dry else 0)
    assert ("preflight failed: nothing was trained" in done.stderr) == bool(code)
    assert run.run_dir.exists() == (not dry)
