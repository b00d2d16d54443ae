"""The process that runs a study on this machine with run.sh, and the ranks of a command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.launch import local
from jobkit.launch.command import LaunchConfig, LaunchRequest, local_command
from jobkit.outcome.state import run_state
from jobkit.paths import RunPaths, read_json
from jobkit.spec.study import Plan, Study
from support.fake_study import logs
from support.place import ROOT
from support.stub_srun import Kit

MARKER = "s3cr3t-of-the-user"


def plan_of(folder: Path, text: str, repeats: int = 1) -> Plan:
    """A saved study whose runs leave their environment in a file, and go on with a shell's text."""
    text = f'env > "{folder}/part"; mv "{folder}/part" "{folder}/seen"; {text}'
    plan = Study.of_command(("bash", "-c", text), name="s", gpus=(1,), repeats=repeats).expand()
    plan.save()
    return plan


def drive(folder: Path, text: str, repeats: int = 1, **env: str) -> list[str]:
    seen, plan = folder / "seen", plan_of(folder, text, repeats)
    folders = {run_id: plan.paths.run(run_id).folder for run_id in plan.runs}
    runs = {run_id: local_command(spec, folders[run_id]) for run_id, spec in plan.runs.items()}
    own = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    argv = [sys.executable, "-m", "jobkit.launch.local", str(plan.paths.folder)]
    with subprocess.Popen(argv, stdin=-1, stdout=-1, text=True, env=own | env) as driver:
        assert driver.stdin
        with driver.stdin:
            json.dump({"runs": runs, "parent": None}, driver.stdin)
        if text.startswith("exec sleep"):
            while not seen.exists() and driver.poll() is None:
                time.sleep(0.05)
            driver.send_signal(signal.SIGTERM)
        assert driver.wait() == 0
    return seen.read_text().splitlines()


def runs() -> list[RunPaths]:
    plan = Plan.read(logs() / "s" / "plan.json")
    return [plan.paths.run(run_id) for run_id in plan.runs]


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("kill -9 $(grep -Po '^ .pid.: \\K[0-9]+' $JOBKIT_RUN_DIR/job.json)", "failed", 137),
        ("exec sleep 100", "cancelled", 143),
    ],
)
def test_nothing_of_the_environment_is_left_on_disk(tmp_path, text, status, code) -> None:
    assert f"WANDB_API_KEY={MARKER}" in drive(tmp_path, text, WANDB_API_KEY=MARKER)
    files = [p for p in logs().rglob("*") if p.is_file()]
    assert [p for p in files if MARKER.encode() in p.read_bytes()] == []
    (paths,) = runs()
    state = run_state(paths)
    assert (state.status, state.exit_code) == (status, code), state
    job = read_json(paths.job) or {}
    assert job["launcher"] == "local" and job["ended"] is not None


@pytest.mark.parametrize(
    "devices", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "1,3"}]
)
def test_a_run_sees_the_devices_that_its_user_sees(tmp_path: Path, devices: dict[str, str]) -> None:
    outer = {"SLURM_JOB_ID": "7", "WORLD_SIZE": "9"}  # of an outer job
    seen = drive(tmp_path, "exit 0", **outer, **devices)
    shown = [x for x in seen if x.startswith(("CUDA_VISIBLE", "SLURM_", "JOBKIT_LAUNCHER"))]
    assert shown == [f"{name}={value}" for name, value in devices.items()]
    # Ranks of one machine meet on an address that no other machine reaches.
    assert {"WORLD_SIZE=1", "GLOO_SOCKET_IFNAME=lo"} <= set(seen)


def test_runs_are_started_one_after_the_other_whatever_becomes_of_the_first(tmp_path) -> None:
    """Two at a time would each be measured beside the other; a log that is a link is a failure."""
    work = tmp_path / "at-work"
    text = f"mkdir {work} || touch {tmp_path}/beside; sleep 0.3; rmdir {work}"
    plan_of(tmp_path, text, 3)
    first, *others = runs()
    first.folder.mkdir()
    first.log.symlink_to(tmp_path / "precious")
    drive(tmp_path, text, repeats=3)
    assert not (tmp_path / "beside").exists() and not (tmp_path / "precious").exists()
    assert [run_state(paths).status for paths in (first, *others)] == ["failed", "ok", "ok"]


def test_the_second_of_two_launches_at_once_says_who_was_first(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "exit 0")
    with local.held(plan.paths), pytest.raises(UsageError, match="s is being run by another one"):
        local.start(plan, [], LaunchRequest())


def test_what_too_few_gpus_mean_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda _: True)
    study = Study(name="s", strategies=("ddp",), gpus=(1, 2))
    plan = {d: study.changed(settings={"device": d}).expand() for d in ("auto", "cpu", "cuda")}
    on_cpu = "1 GPU for up to 2 ranks: runs with more ranks than GPUs compute on the CPU"
    shares = "a rank has 8 threads at one size and 4 at another: to compare equal ranks set "
    shares += "--threads 4"
    for device, gpus, texts in [("cpu", 1, [shares]), ("auto", 2, []), ("auto", 0, [shares]),
                                ("auto", 1, [on_cpu])]:  # fmt: skip
        monkeypatch.setattr(local, "count_gpus", lambda gpus=gpus: gpus)
        assert local.warnings(plan[device]) == texts
    program = Study.of_command(("true",), name="p", gpus=(1, 2)).expand()
    monkeypatch.setattr(local, "count_gpus", lambda: 0)
    assert local.warnings(program) == [shares.replace("--threads ", "OMP_NUM_THREADS=")]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert local.warnings(program) == []
    with pytest.raises(UsageError, match="--device cuda: 2 ranks need as many GPUs"):
        local.check(plan["cuda"])


# --- the ranks of a command -----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def test_that_ranks_did_not_work_together_is_noted(tmp_path: Path) -> None:
    """They wait until they were looked at often enough; of `once` nothing is said."""
    text = "export RANK WORLD_SIZE=2; for RANK in 0 1; do sleep 6 & done; wait"
    command = ["--nproc-per-node", "2", "--no-auto", "--", "bash", "-c", text]
    kits, processes = [], []
    for launcher in ("srun", "once"):
        (tmp_path / launcher).mkdir()
        kits.append(kit := Kit(tmp_path / launcher))
        words = ["--launcher", launcher, *command]
        processes.append(kit.start(*words, JOBKIT_LAUNCHER="local"))
    assert [process.communicate() and process.returncode for process in processes] == [0, 0]
    jobs = [read_json(kit.run_dir / "job.json") or {} for kit in kits]
    assert [job["ranks_together"] for job in jobs] == ["none", None]


def test_the_first_failure_ends_the_others_and_is_the_code(run: Kit) -> None:
    text = "[[ $RANK == 1 ]] && exit 7; exec sleep 600"
    assert run("--nproc-per-node", "3", "--", "bash", "-c", text).returncode == 7
    assert run.outcome()["reason"] == "rank 1: exit code 7"


BINDS = """
import contextlib, os, socket
for reuse in (0, 1):
    with socket.socket() as end, contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        end.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        print("listens", reuse, end.listen())
"""


def test_the_port_of_the_ranks_is_given_to_no_other_program(run: Kit) -> None:
    """The first rank binds it, as torch does, while others cannot."""
    assert run("--", sys.executable, "-c", BINDS).stdout.splitlines()[1:] == ["listens 1 None"]


def test_the_end_on_request_leaves_nothing(run: Kit) -> None:
    """Also what a rank started and forgot; and no other attempt begins."""
    text = "sleep 300 & echo $! > $RANK; setsid sleep 301 & echo $! > away-$RANK; echo ready; wait"
    own = ["--nproc-per-node", "2", "--max-restarts", "2"]
    with run.start(*own, "--", "bash", "-c", text) as process:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(3)][1:] == ["ready\n"] * 2
        process.terminate()
        assert process.wait(200) == 143
    state = run_state(RunPaths(run.run_dir))
    assert (state.status, state.attempts) == ("cancelled", 1)
    assert run.outcome()["reason"].endswith("ended by SIGTERM")
    for name in ("0", "1", "away-0", "away-1"):
        state = Path(f"/proc/{(run.folder / name).read_text().strip()}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


def test_lines_of_ranks_that_write_together_stay_whole(run: Kit) -> None:
    """Each line is written in two parts, as an unbuffered Python does."""
    text = "for i in {1..300}; do printf 'rank %s' $RANK; printf ' line %s\\n' $i; done; printf end"
    lines = run("--nproc-per-node", "2", "--", "bash", "-c", text).stdout.splitlines()
    whole = [f"rank {rank} line {n}" for rank in (0, 1) for n in range(1, 301)]
    assert sorted(line for line in lines if line.startswith("rank")) == sorted(whole)


# --- LaunchConfig and run() of Python -------------------------------------------------------------

PROGRAM = """
import os, sys, time
os.write(1, f"rank {os.environ['RANK']}: {sys.argv[1:-1]}\\n".encode())
while sys.argv[-1] == "wait":
    time.sleep(0.05)
sys.exit(3)
"""
FROM_PYTHON = """
import sys
from jobkit.launch.command import LaunchConfig, run
command = ("train.py", "a b", "--lr=1", sys.argv[1])
sys.exit(run(LaunchConfig(command=command, nproc_per_node=2)))
"""


@pytest.mark.parametrize(("word", "code"), [("wait", 130), ("fail", 3)])
def test_the_words_arrive_and_the_code_comes_back(tmp_path: Path, word, code) -> None:
    """130: Ctrl-C ends the ranks, and the code tells."""
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JOBKIT_PYTHON": sys.executable}
    with subprocess.Popen(
        [sys.executable, "-c", FROM_PYTHON, word], env=env | {"JOBKIT_LOGS": str(tmp_path)},
        text=True, stdout=subprocess.PIPE, cwd=tmp_path, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout
        lines = (line for line in process.stdout if line.startswith("rank"))
        if word == "wait":
            said = {next(lines) for _ in range(2)}
            assert said == {f"rank {rank}: ['a b', '--lr=1']\n" for rank in range(2)}
            os.killpg(process.pid, signal.SIGINT)  # as the terminal does
        assert process.wait(300) == code


def test_the_line_of_run_sh(monkeypatch) -> None:
    monkeypatch.setenv("JOBKIT_PYTHON", "/opt/python")
    of_a_path = LaunchConfig(command=(Path("t.py"),))  # type: ignore[arg-type]
    assert of_a_path.line()[2:] == ["--", "/opt/python", "t.py"]
    config = LaunchConfig(command=("python", "t.py"), nnodes=2, node_rank=1, master_addr="n0")
    size = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "n0"]
    assert config.line()[2:] == [*size, "--", "python", "t.py"]
    with pytest.raises(UsageError, match="list of words"):
        LaunchConfig(command="train.py --lr 1").line()
