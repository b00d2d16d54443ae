"""run.sh with a command: what its ranks get, where they run, how it ends; srun is a stub."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.outcome.status import run_state
from jobkit.paths import RunPaths
from jobkit.program.counters import COUNTERS
from support.place import ROOT
from support.stub_srun import JOB, RUN, Kit

# In one write, as the stub of srun does not keep lines whole.
SHOW = """
import os, sys
os.write(1, ascii([os.environ.get(n) for n in sys.argv[1:]]).encode() + b"\\n")
"""


@pytest.fixture
def run(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


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
        "exit_code": 0, "status": "ok", "reason": "", "run_id": "my run's", "attempt": 0,
    }  # fmt: skip
    spec = json.loads((run.run_dir / "spec.json").read_text())["spec"]
    assert spec["command"] == [sys.executable, "-c", show, *ODD]
    assert (spec["launcher"], spec["nodes"], spec["ranks_per_node"]) == ("srun", 1, 2)


def test_the_place_of_a_rank_comes_from_the_step(run: Kit) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"]
    done = run("--", sys.executable, "-c", SHOW, *names, **JOB)
    assert sorted(done.stdout.splitlines()[1:]) == [
        ascii([str(r), str(r), "2", "2", "0", "nid007-ib"]) for r in (0, 1)
    ]
    options = run.notes.read_text().splitlines()
    assert {"--kill-on-bad-exit=1", "--wait=0", "--ntasks=2", "--nodes=1"} <= set(options)


def test_the_port_is_of_the_job_and_outside_the_systems_range(run: Kit) -> None:
    def port(**more: str) -> int:
        done = run("--", sys.executable, "-c", SHOW, "MASTER_PORT", **{**JOB, **more})
        (text,) = set(done.stdout.splitlines()[1:])
        return int(text.strip("[]'"))

    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = {port(), port(SLURM_JOB_ID="18"), port(SLURM_RESTART_COUNT="1")}
    assert len(found) == 3
    assert all(1023 < one < 65536 and not low <= one <= high for one in found)
    assert port(MASTER_PORT="12345") == 12345


@place
def test_what_a_program_is_told_of_its_run(run: Kit, place: str) -> None:
    names = ["JOBKIT_RUN_DIR", "JOBKIT_RUN_ID", "JOBKIT_STUDY", "JOBKIT_ATTEMPT", "JOBKIT_AUTO"]
    names += ["JOBKIT_UNIT", "JOBKIT_WORK_PER_STEP", "JOBKIT_WARMUP_STEPS", "PYTHONSAFEPATH"]
    said = ["--unit", "kilo tokens", "--work-per-step", "1e3", "--warmup-steps", "7"]
    own = {"JOBKIT_UNIT": "stale", "PYTHONPATH": "/of the user:/b"}
    shown = [str(run.run_dir), "my run's", run.folder.name]
    shown += ["0", "1", "kilo tokens", "1e3", "7", None]
    command = ["--", sys.executable, "-c", SHOW, *names]
    assert ascii(shown) in run(*said, *command, **PLACES[place], **own).stdout
    bare = [*shown[:3], "1", None, None, None, "5", None]
    assert ascii(bare) in run("--no-auto", *command, **PLACES[place], **own).stdout
    done = run("--no-auto", "--", sys.executable, "-c", SHOW, "PYTHONPATH", **own)
    assert done.stdout.splitlines()[1] == ascii([f"/of the user:/b:{ROOT}/src"])


CRASH = "import os, sys; sys.exit({code} if os.environ['RANK'] == '1' else 0)"


@place
@pytest.mark.parametrize(
    ("code", "exits", "status", "reason"),
    [
        (3, 3, "failed", "rank 1: exit code 3"),
        (75, 75, "preempted", "rank 1: exit code 75"),
        ("os.kill(os.getpid(), 9)", 137, "failed", "rank 1: ended by SIGKILL"),
        (
            "os.kill(os.getpid(), 12)", 140, "failed",
            "rank 1: ended by the stop signal, SIGUSR2, which the command does not handle",
        ),
    ],
)  # fmt: skip
def test_how_a_rank_ended_is_told(
    run: Kit, place: str, code: object, exits: int, status: str, reason: str
) -> None:
    two = [] if PLACES[place] else ["--nproc-per-node", "2"]
    text = CRASH.format(code=code)
    done = run(*two, "--max-restarts", "0", "--", sys.executable, "-c", text, **PLACES[place])
    assert done.returncode == exits, done.stderr
    outcome = run.outcome()
    assert (outcome["exit_code"], outcome["status"]) == (exits, status)
    assert outcome["reason"] == reason


@place
def test_a_crash_is_started_again_as_often_as_was_said(run: Kit, place: str) -> None:
    text = "import os, sys; sys.exit(3 * (int(os.environ['JOBKIT_ATTEMPT']) < {}))"
    command = ["--max-restarts", "2", "--", sys.executable, "-c"]
    assert run(*command, text.format(2), **PLACES[place]).returncode == 0
    assert [run.outcome(n)["status"] for n in (0, 1, 2)] == ["failed", "failed", "ok"]
    done = run(*command, text.format(9), **PLACES[place])
    assert done.returncode == 3 and len(list((run.run_dir / "attempts").glob("[0-9]*"))) == 6
    assert "starting the run again (2 of 2)" in done.stderr


def test_the_bound_holds_over_requeues_of_the_job(run: Kit) -> None:
    command = ["--max-restarts", "2", "--", sys.executable, "-c"]
    assert run(*command, "raise SystemExit(75)", **JOB).returncode == 75
    assert "requeue 17" in run.notes.read_text()
    assert run(*command, "raise SystemExit(3)", **JOB, SLURM_RESTART_COUNT="1").returncode == 3
    assert len(list((run.run_dir / "attempts").glob("[0-9]*"))) == 3


@place
def test_a_command_that_is_not_there(run: Kit, place: str) -> None:
    done = run("--max-restarts", "2", "--", "no such\ncommand", **PLACES[place])
    assert done.returncode == 127
    assert done.stderr.count("jobkit: error: no command $'no such\\ncommand' on ") == 1
    outcome = run.outcome()
    assert outcome["status"] == "failed" and "no command" in outcome["reason"]
    assert len(list((run.run_dir / "attempts").glob("[0-9]*"))) == 1


def test_an_unknown_command_leaves_nothing_where_no_folder_was_asked_for(run: Kit) -> None:
    words = ["bash", str(RUN), "--", "no-such-command"]
    own = run.environ(JOBKIT_LOGS=str(run.folder / "logs"))
    done = subprocess.run(words, env=own, capture_output=True, text=True, cwd=run.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jobkit: error: no command 'no-such-command' on ")
    assert not (run.folder / "logs").exists()


SAVES = """
import signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("launcher", "signum", "code", "status"),
    [
        ("srun", signal.SIGUSR2, 75, "preempted"),
        ("once", signal.SIGUSR2, 75, "preempted"),
        ("srun", signal.SIGTERM, 143, "cancelled"),
        ("srun", signal.SIGINT, 130, "cancelled"),
    ],
)
def test_a_warning_or_the_end_on_request_reaches_the_command(
    run: Kit, launcher: str, signum: signal.Signals, code: int, status: str
) -> None:
    own = ["--launcher", launcher, "--max-restarts=2" if code > 75 else "--nproc-per-node=1"]
    with subprocess.Popen(
        run.words(*own, "--", sys.executable, "-c", SAVES),
        env=run.environ(), stdout=subprocess.PIPE, text=True, cwd=run.folder,
    ) as process:  # fmt: skip
        assert process.stdout
        assert "ready\n" in process.stdout  # reads up to that line, or to the end
        process.send_signal(signum)
        assert process.wait(300) == code
    assert run_state(RunPaths(run.run_dir)).status == status
    if status == "cancelled":  # a rank's end, and no other start
        outcome = run.outcome()
        assert (outcome["exit_code"], outcome["reason"]) == (143, "rank 0: ended by SIGTERM")


UNEVEN = {**JOB, "SLURM_NTASKS": "5", "SLURM_JOB_NUM_NODES": "2"}
BAD: list[tuple[list[str], dict[str, str], str]] = [
    (["--epochs", "3", "--", "true"], {}, "unknown option --epochs: after -- comes the command"),
    (["--"], {}, "-- needs a command after it"),
    (["--launcher", "mpirun", "--", "true"], {}, "must be srun, torchrun or once"),
    (["--launcher", "once"], {}, "are of a command, which comes after --"),
    (["--work-per-step", "0x3", "--unit", "u", "--", "true"], {}, "must be a number above 0"),
    (["--work-per-step", "3", "--", "true"], {}, "--work-per-step needs --unit"),
    (["--warmup-steps", "-1", "--", "true"], {}, "must be a whole number"),
    (["--unit", "a\nb", "--", "true"], {}, "--unit: has a control character"),
    (["--comm", "--", "true"], {}, "--comm measures instead of a command"),
    (["--", "true"], UNEVEN, "5 tasks on 2 nodes: give --nodes and --ntasks-per-node"),
    (["--", "true"], {"JOBKIT_ENERGY": "nvml,joules"}, f"name some of {', '.join(COUNTERS)}"),
    (["--", "true"], {"JOBKIT_ENERGY": "none,rapl"}, "separated by commas, or none"),
]


@pytest.mark.parametrize(("words", "variables", "said"), BAD, ids=[said for *_, said in BAD])
def test_wrong_use_is_one_line_and_2(
    run: Kit, words: list[str], variables: dict[str, str], said: str
) -> None:
    done = run(*words, **variables)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not run.run_dir.exists()


def test_a_dry_run_shows_the_command_and_starts_nothing(run: Kit) -> None:
    energy = ",".join(COUNTERS)
    done = run("--dry-run", "--nproc-per-node=3", "--", "touch", "a b", JOBKIT_ENERGY=energy)
    assert (done.returncode, done.stdout) == (0, "srun, 3 rank(s) on 1 node(s): touch a\\ b\n")
    assert not run.run_dir.exists() and not (run.folder / "a b").exists()


# The words before the image are its own; what follows runs inside, without a jobkit there.
APPTAINER = """#!/bin/sh
echo "apptainer $*" | head -1 >> "$NOTES"
while [ "$1" != image.sif ]; do shift; done
shift
exec "$@"
"""
PLACE = ["bash", "-c", 'echo "rank $RANK of $WORLD_SIZE: $1"', "-", "a b"]


def site(run: Kit, text: str) -> list[str]:
    (run.folder / "own.toml").write_text(text)
    return ["--site", str(run.folder / "own.toml")]


def test_the_ranks_are_inside_the_container(run: Kit) -> None:
    (run.folder / "apptainer").write_text(APPTAINER)
    (run.folder / "apptainer").chmod(0o755)
    own = 'container = "apptainer"\nimage = "image.sif"\nmounts = ["/data:/data"]\n'
    done = run(*site(run, own), "--", *PLACE, **JOB)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert sorted(said) == ["rank 0 of 2: a b", "rank 1 of 2: a b"]
    assert run.notes.read_text().count("apptainer exec --nv --bind /data:/data image.sif bash") == 2
    assert run.outcome()["status"] == "ok"


def checked(run: Kit, code: int) -> dict[str, str]:
    """A Python that notes what it is asked for, and says how the preflight ended."""
    stub = run.folder / "checking"
    stub.write_text(f'#!/bin/sh\necho "python $*" >> "$NOTES"\nexit {code}\n')
    stub.chmod(0o755)
    return {**JOB, "JOBKIT_PYTHON": str(stub)}


@pytest.mark.parametrize(("code", "dry"), [(0, []), (5, []), (0, ["--dry-run"])])
def test_a_preflight_comes_before_the_command(run: Kit, code: int, dry: list[str]) -> None:
    """It asks for no data of a training; a dry run only checks."""
    done = run("--preflight", *dry, "--", *PLACE, **checked(run, code))
    assert done.returncode == code, done.stderr
    (asked, *more) = [x for x in run.notes.read_text().splitlines() if x.startswith("python")]
    assert not more and asked.endswith("-- --dataset synthetic")
    assert "-m jobkit.checks.preflight.cli" in asked
    assert done.stdout.count("of 2: a b") == (2 if not code and not dry else 0)
    assert ("preflight failed: nothing was trained" in done.stderr) == bool(code)
    assert run.run_dir.exists() == (not dry)
