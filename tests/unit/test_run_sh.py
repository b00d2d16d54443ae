"""run.sh with a python that only notes how it was called: arguments, exit codes, folders."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.launch import start
from jobkit.launch.start import MAX_RESTARTS, NO_CRASH, WARNING_S
from jobkit.processes import pid_namespace
from support.place import ROOT, script
from support.stub_srun import RUN, Fake

HPC = ROOT / "hpc"


@pytest.fixture
def run(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_arguments_arrive_whole_and_each_start_is_an_attempt_of_its_own(run: Fake) -> None:
    words = ["--model", "a b", "--data-dir", "my --help dir", "--x=$HOME", "it's", 'say "hi"']
    words += ["two\nlines", "*", "", "\\", "é"]
    for attempt in ("0", "1", "2"):
        done = run("--nproc-per-node", "3", *words, JOBKIT_LAUNCHER="local")  # has checked them
        assert done.returncode == 0, done.stderr
        launcher = run.calls()[-1]
        at = launcher.index("jobkit.payload.main") + 1
        assert launcher[at:] == [*words, "--run-dir", str(run.run_dir), "--attempt", attempt]
        assert launcher[launcher.index("--rdzv-backend") + 1] == "static"
        assert launcher[launcher.index("--nproc-per-node") + 1] == "3"
        assert done.stdout.startswith(f"[jobkit] start: attempt {attempt} of {run.run_dir} on ")


IN_JOB = {"SLURM_JOB_ID": "5"}
UNEVEN = {**IN_JOB, "SLURM_NTASKS": "5", "SLURM_JOB_NUM_NODES": "2"}
REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("--nproc-per-node", {}, "--nproc-per-node needs a value"),
    ("--nproc-per-node=2;ls", {}, "--nproc-per-node 2;ls: must be a whole number, 1 or more"),
    ("--ntasks-per-node 2", {}, "--nodes and --ntasks-per-node are for an allocation"),
    ("--nodes 2", IN_JOB, "--nodes needs --ntasks-per-node"),
    ("--nodes x --ntasks-per-node 1", IN_JOB, "--nodes x: must be a whole number"),
    ("--max-restarts x", {}, "--max-restarts x: must be a whole number, 0 or more"),
    ("--monitor-interval 0", {}, "--monitor-interval 0: must be a number of seconds, above 0"),
    ("--check=2", {}, "--check takes no value"),
    ("--nproc 2", {}, "unknown option --nproc: write --nproc-per-node 2"),
    ("--gpus=4", {}, "unknown option --gpus=4: write --nproc-per-node 4"),
    ("python train.py", {}, "a command comes after --, as: bash run.sh -- python train.py"),
    ("--nnodes 2 --run-dir r", {}, "--nnodes needs --node-rank beside it"),
    ("--node-rank 1", {}, "need --nnodes beside them"),
    ("--nnodes 2 --node-rank 2 --master-addr h --run-dir r", {}, "--node-rank 2: must be below"),
    ("--nnodes 2 --node-rank 1 --master-addr h --run-dir r", IN_JOB, "here srun starts all"),
    ("--epochs 3 -- true", {}, "unknown option --epochs: after -- comes the command"),
    ("--", {}, "-- needs a command after it"),
    ("--launcher mpirun -- true", {}, "must be srun, torchrun or once"),
    ("--launcher once", {}, "are of a command, which comes after --"),
    ("--work-per-step 0x3 --unit u -- true", {}, "must be a number above 0"),
    ("--work-per-step 3 -- true", {}, "--work-per-step needs --unit"),
    ("--why all -- true", {}, "must be a whole number of steps, 0 or more"),
    ("--unit a\nb -- true", {}, "must be text without a control character"),
    ("--comm --preflight", {}, "one after the other, not both"),
    ("--comm -- true", {}, "--comm measures instead of a command"),
    ("-- true", UNEVEN, "5 tasks on 2 nodes: give --nodes and --ntasks-per-node"),
]


def test_words_that_cannot_be_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, variables, message in REFUSED:
        with monkeypatch.context() as patch:
            patch.delenv("SLURM_JOB_ID", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(UsageError, match=re.escape(message)):
                start.read_run([str(RUN), "0", "0", *words.split(" ")])


def test_what_cannot_be_started_is_one_line_and_2(run: Fake) -> None:
    (folder := run.folder / "other").mkdir()
    (folder / "spec.json").write_text('{"spec": {"lr": 0.3}}')
    for words, extra, message in (
        ("", {"NO_TORCH": "1"}, "has no torch and torchvision: run 'make venv' once"),
        ("", {"JOBKIT_PYTHON": "no-such", **IN_JOB}, "no 'no-such' on PATH: run 'make venv' once"),
        ("--epochs 0", IN_JOB, "epochs"),  # what the payload says of its settings
        (f"--run-dir {folder}", {}, "was made for another run: lr is 0.3 there and 0.05 here"),
        ("--run-dir /etc/passwd/run", {}, "is not writable: choose another with --run-dir"),
        ("", {"JOBKIT_HOST_PYTHON": "no-such"}, "(tried no-such): name one with JOBKIT_HOST"),
    ):
        done = run(*words.split(), **extra)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("jobkit: error: ") and message in done.stderr
        assert not run.run_dir.exists() and "--attempt" not in str(run.calls())


def test_one_rank_per_gpu_that_is_visible(run: Fake) -> None:
    gpus = "GPU 0: A (UUID: GPU-a)\\nGPU 1: A (UUID: GPU-b)\\nGPU 2: A (UUID: GPU-c)\\n"
    run.tool("nvidia-smi", f"#!/bin/sh\nprintf '{gpus}'\n")
    run(CUDA_VISIBLE_DEVICES="0,1")
    launcher = run.calls()[-1]
    assert launcher[launcher.index("--nproc-per-node") + 1] == "2"


@pytest.mark.parametrize(
    ("job_id", "cluster", "known"), [("17", "alps", "alps"), ("17", 'a"b', None), (None, "", None)]
)
def test_a_start_in_a_folder_of_a_run_sh_is_noted_there(run, job_id, cluster, known) -> None:
    """Else status would tell of the process or the job of the start before; not in a study's."""
    run.run_dir.mkdir()
    file = run.run_dir / "job.json"
    env = {"SLURM_JOB_ID": job_id, "SLURM_CLUSTER_NAME": cluster}
    for launcher in ("slurm", "run.sh"):
        left = {"launcher": launcher, "job_id": "3", "pid": 1}
        file.write_text(json.dumps(left))
        assert run(**{name: value for name, value in env.items() if value}).returncode == 0
        found = json.loads(file.read_text())
        assert (found == left) == (launcher == "slurm")
    assert (found["launcher"], found["job_id"], found["cluster"]) == ("run.sh", job_id, known)
    assert found["pid"] != 1 and found["pid_ns"] == pid_namespace()
    assert (found["child"] is None) == bool(job_id)  # Slurm knows of its own job
    assert [p.name for p in run.run_dir.glob("job.json*")] == ["job.json"]


def test_what_only_looks_makes_no_folder(run: Fake) -> None:
    """And the help, for which no python is needed, shows each option that run.sh takes."""
    done = run("-h")
    assert (done.returncode, done.stderr, run.calls()) == (0, "", [])
    taken = {*start.OPTIONS, *start.FLAGS} - {"site-file"}  # the launcher's own
    assert {name for name in taken if f"--{name}" not in done.stdout} == set()
    for word in ("--dry-run", "--check", "--help-training"):
        assert run(word).returncode == 0
    assert not run.run_dir.exists() and "--attempt" not in str(run.calls())


def test_the_checkouts_python_stands_in(tmp_path, monkeypatch, capsys) -> None:
    """For one without torch."""
    ours = tmp_path / ".venv" / "bin" / "python"
    ours.parent.mkdir(parents=True)
    script(ours, "#!/bin/sh\nexit $OWN\n")
    script(tmp_path / "python", "#!/bin/sh\nexit $ON_PATH\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    note = f"jobkit: note: no python on PATH that has torch: taking {ours}\n"
    for on_path, own, named, taken in (
        ("1", "0", "", (str(ours), note)),  # a shell that has not activated the environment
        ("0", "0", "", ("python", "")),
        ("1", "1", "", None),  # neither has torch
        ("1", "0", "JOBKIT_PYTHON", None),  # what was named is not replaced
    ):
        monkeypatch.setenv("ON_PATH", on_path)
        monkeypatch.setenv("OWN", own)
        monkeypatch.delenv("JOBKIT_PYTHON", raising=False)
        if named:
            monkeypatch.setenv(named, "python")
        run = start.read_run([str(tmp_path / "run.sh"), "0", "0"])
        if taken is None:
            with pytest.raises(UsageError, match="no torch and torchvision: run 'make venv' once"):
                start.choose_python(run)
            continue
        start.choose_python(run)
        assert (run.python, capsys.readouterr().err) == taken


def test_the_outcome_decides_the_exit_code(run: Fake) -> None:
    for code, outcome, expected in (
        ("1", "75", 75),  # the launcher knows only that a rank ended badly
        ("0", "2", 2),  # ranks end with 0 on bad input, to spare the reader a traceback
        ("9", "", 9),
        ("1", '{"status": "x"}', 1),
        ("1", "0", 0),  # all results are there
    ):
        done = run(CODE=code, OUTCOME=outcome)
        assert done.returncode == expected
        said = "warning: the launcher ended with code 1 after the run had recorded"
        assert (said in done.stderr) == ((code, outcome) == ("1", "0"))


def test_the_end_on_request_reaches_the_launcher_and_the_code(run: Fake) -> None:
    for outcome, pod, code in (("0", "", 143), ("0", "1", 0), ("75", "1", 75)):
        with run.start(SLEEP="1", OUTCOME=outcome, JOBKIT_POD=pod) as process:
            assert process.stdout and "asleep\n" in process.stdout  # reads up to that line
            process.terminate()
            assert process.wait(100) == code
        assert "ended by TERM" in run.notes.read_text()
        run.notes.unlink()


def test_in_an_allocation_srun_starts_the_payload(run: Fake) -> None:
    words = ["--nproc-per-node", "4", "--epochs", "2"]
    done = run(*words, **IN_JOB, SLURM_CPUS_PER_TASK="7", CODE="3")
    assert done.returncode == 3
    assert "--nproc-per-node has no effect in an allocation" in done.stderr
    call = run.calls()[-1]
    at = call.index(str(run.python))
    assert call[0] == "srun" and {"--kill-on-bad-exit=1", "--cpus-per-task=7"} <= set(call[:at])
    assert call[at + 1 : at + 3] == ["-m", "jobkit.payload.main"]
    assert call[at + 3 : at + 5] == ["--epochs", "2"]


def test_srun_binds_no_rank_away_from_its_peers(run: Fake) -> None:
    for step, said in (({}, "CPU_BIND=x"), ({"SLURM_STEP_ID": "4294967290"}, "CPU_BIND=none")):
        run(SLURM_JOB_ID="7", SLURM_CPU_BIND="x", **step)
        words = " ".join(run.calls()[-1])
        assert said in words and "--gpu" not in words


def test_ranks_are_the_tasks_that_the_job_asked_for(monkeypatch) -> None:
    """run.sh's header, --ntasks-per-node=4, is a bound beside `sbatch --ntasks=2`."""
    for tasks, step, words, ranks in (
        *(("2", "", [], 2), ("2", "0", [], 4), ("", "", [], 4)),
        ("2", "", ["--ntasks-per-node=3"], 3),
    ):
        job = {**IN_JOB, "SLURM_NTASKS_PER_NODE": "4", "SLURM_NTASKS": tasks, "SLURM_STEP_ID": step}
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        assert start.read_run(["run.sh", "0", "0", *words]).ranks == ranks
    # srun would refuse the number of a job of `sbatch --ntasks-per-gpu` beside it, and give ranks
    # nothing of what a site has set after `sbatch --export=NONE`.
    job = {"SLURM_NTASKS_PER_GPU": "1", "SLURM_EXPORT_ENV": "NONE", "A": "b"}
    assert start.step_environment(job) == {"A": "b"}
    # Nor takes it run.sh's header beside `sbatch --gres=gpu:2`, and shows a task its own GPU alone.
    gpus = {"SLURM_GPUS_PER_NODE": "4", "SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "2"}
    assert start.step_environment(gpus) == {"SLURM_GPUS_ON_NODE": "2"}


IMPATIENT = """
import sys
from jobkit.launch import supervise
supervise.STUCK_AFTER_S, supervise.LOOK_EVERY_S = 0.2, 0.1
sys.exit(supervise.main(sys.argv[1:]))
"""


def test_a_run_that_has_ended_does_not_wait_for_an_srun_that_does_not(run: Fake) -> None:
    """srun waits for a node that it cannot reach; the limits of 5 and 90 s are short ones here."""
    ends = """echo '{"exit_code": 0, "status": "ok"}' > "$RUN_DIR/attempts/0/outcome.json"\n"""
    run.tool("srun", f"#!/bin/bash\n{ends}exec /bin/sleep 60\n")
    words = [sys.executable, "-c", IMPATIENT, str(RUN), "0", "0", "--run-dir", str(run.run_dir)]
    env = run.environ(SLURM_JOB_ID="5", RUN_DIR=str(run.run_dir), PYTHONPATH=str(ROOT / "src"))
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert "the run has ended, and srun has not 0.2 s later" in done.stderr
    assert done.returncode == 0


def header(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and line[0] != "#")
    directives = [line for line in lines[:first_command] if line.startswith("#SBATCH ")]
    assert directives == [line for line in lines if line.replace(" ", "").startswith("#SBATCH")]
    return directives


@pytest.mark.parametrize("name", ["comm", *sorted(p.stem for p in HPC.glob("train*.sh"))])
def test_the_ready_scripts_are_signalled_and_requeued_as_run_sh_is(name: str) -> None:
    own = ("--nodes", "--ntasks", "--cpus", "--gpus", "--job-name", "--output", "--error")
    common = {x for x in header(RUN) if not x.split()[1].startswith(own)}
    assert common >= {"#SBATCH --requeue", "#SBATCH --signal=USR2@60", "#SBATCH --open-mode=append"}
    assert "#SBATCH --nodes=1" in header(RUN) and common <= set(header(HPC / f"{name}.sh"))


def test_run_sh_has_the_numbers_of_the_core() -> None:
    text = RUN.read_text()
    assert f"#SBATCH --signal=USR2@{WARNING_S}\n" in text
    assert f"(default {MAX_RESTARTS})" in text
    assert 75 in NO_CRASH and not {1, 137} & {*NO_CRASH}


@pytest.mark.needs("shellcheck")
def test_the_scripts_pass_shellcheck() -> None:
    scripts = [*ROOT.glob("*.sh"), *HPC.glob("*.sh"), ROOT / ".ci" / "run"]
    assert len(scripts) > 6
    subprocess.run(["shellcheck", "-x", *scripts], check=True)
