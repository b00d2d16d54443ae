"""run.sh with a python that only notes how it was called: arguments, exit codes, folders."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobkit.processes import pid_namespace
from jobkit.requeue import MAX_RESTARTS, WARNING_S, crashed
from jobkit.spec.runspec import RunSpec
from support.place import ROOT

RUN, HPC = ROOT / "run.sh", ROOT / "hpc"
# Answers the two questions that run.sh asks before the start, then plays the launcher.
FAKE = r"""#!/usr/bin/env bash
printf '%s\0' "$@" CALL >> "$NOTES"
case "$*" in
  -c*) exit "${NO_TORCH:-0}" ;;
  *--check*) [[ -n ${BAD-} ]] && { echo "jobkit: error: bad" >&2; exit 2; }; exit 0 ;;
  *--help) echo usage; exit 0 ;;
esac
if [[ -n ${OUTCOME-} ]]; then
  while (($#)); do
    case $1 in --run-dir) dir=$2 ;; --attempt) n=$2 ;; esac
    shift
  done
  [[ $OUTCOME == \{* ]] || OUTCOME="{\"exit_code\": $OUTCOME, \"status\": \"x\"}"
  printf '%s\n' "$OUTCOME" > "$dir/attempts/$n/outcome.json"
fi
if [[ -n ${SLEEP-} ]]; then
  trap 'echo ended by TERM >> "$NOTES"; exit 15' TERM
  echo asleep; sleep 30 & wait
fi
exit "${CODE:-0}"
"""


class Fake:
    """run.sh and its fake python, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder, folder / "notes"
        self.python = folder / "a python"
        self.python.write_text(FAKE)
        self.python.chmod(0o755)
        self.run_dir = folder / "my run's dir"

    def environ(self, **extra: str) -> dict[str, str]:
        keep = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG")}
        keep["PATH"] = f"{self.folder}:{os.environ['PATH']}"
        return {**keep, "JOBKIT_PYTHON": str(self.python), "NOTES": str(self.notes), **extra}

    def __call__(self, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(RUN), *words],
            env=self.environ(**extra),
            capture_output=True,
            text=True,
            timeout=100,
            cwd=self.folder,
        )

    def tool(self, name: str, text: str) -> None:
        """Put a program on PATH."""
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def calls(self) -> list[list[str]]:
        text = self.notes.read_text() if self.notes.exists() else ""
        return [call.split("\0")[:-1] for call in text.split("CALL\0")[:-1]]

    def payload(self) -> list[str]:
        """The words that reached the payload in the last call, the launcher's own before them."""
        last = self.calls()[-1]
        return last[last.index("jobkit.payload.main") + 1 :]


@pytest.fixture
def run(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_arguments_arrive_whole(run: Fake) -> None:
    words = [
        "--model",
        "a b",
        "--data-dir",
        "my --help dir",
        "--x=$HOME",
        "it's",
        'say "hi"',
        "two\nlines",
        "*",
        "",
        "\\",
        "é",
    ]
    done = run("--nproc-per-node", "3", *words, "--run-dir", str(run.run_dir))
    assert done.returncode == 0, done.stderr
    assert run.payload() == [*words, "--run-dir", str(run.run_dir), "--attempt", "0"]
    launcher = run.calls()[-1]
    assert launcher[launcher.index("--nproc-per-node") + 1] == "3"
    assert "--standalone" in launcher
    check = run.calls()[-2]
    assert check[2:] == [*words, "--check=3"]


REFUSED: list[tuple[list[str], dict[str, str], str]] = [
    (["--nproc-per-node"], {}, "--nproc-per-node needs a value"),
    (["--nproc-per-node", "0"], {}, "--nproc-per-node 0: must be a whole number, 1 or more"),
    (["--nproc-per-node=2;ls"], {}, "--nproc-per-node 2;ls: must be"),
    (["--ntasks-per-node", "2"], {}, "--nodes and --ntasks-per-node are for an allocation"),
    (["--nodes", "2"], {"SLURM_JOB_ID": "5"}, "--nodes needs --ntasks-per-node"),
    (["--ntasks-per-node", "many"], {"SLURM_JOB_ID": "5"}, "many: must be a whole number"),
    (["--max-restarts", "x"], {}, "--max-restarts x: must be a whole number, 0 or more"),
    (["--start-timeout", "0"], {}, "--start-timeout 0: must be a number of seconds, above 0"),
    (["--comm", "--preflight"], {}, "one after the other, not both"),
    ([], {"NO_TORCH": "1"}, "has no torch and torchvision: run 'make venv' once"),
    ([], {"NO_TORCH": "1", "SLURM_JOB_ID": "5"}, "has no torch and torchvision: run 'make venv'"),
    ([], {"JOBKIT_PYTHON": "no-such"}, "no 'no-such' on PATH: run 'make venv' once"),
    ([], {"BAD": "1"}, "bad"),  # what the payload says of its settings
    (["--run-dir", "/dev/null/run"], {}, "is not writable: choose another with --run-dir"),
]


@pytest.mark.parametrize(("words", "extra", "message"), REFUSED)
def test_what_cannot_be_started_ends_with_2_and_nothing_is_written(
    run: Fake, words: list[str], extra: dict[str, str], message: str
) -> None:
    done = run("--run-dir", str(run.run_dir), *words, **extra)
    assert done.returncode == 2
    assert done.stderr.startswith("jobkit: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not run.run_dir.exists()
    assert [call for call in run.calls() if "--attempt" in call] == []


@pytest.mark.parametrize(("visible", "ranks"), [(None, "2"), ("1", "1"), ("", "1")])
def test_one_rank_per_gpu_that_is_visible(run: Fake, visible: str | None, ranks: str) -> None:
    gpus = "GPU 0: A (UUID: GPU-a)\\nGPU 1: A (UUID: GPU-b)\\n"
    run.tool("nvidia-smi", f"#!/bin/sh\nprintf '{gpus}'\n")
    fake = run.python.read_text()
    counts = f'[[ "$*" == "-m jobkit.gpus" ]] && exec {sys.executable} "$@"\n'
    run.python.write_text(fake.replace("printf", counts + "printf", 1))
    more = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = run(JOBKIT_LOGS=str(run.folder), **more)
    assert done.returncode == 0, done.stderr
    launcher = run.calls()[-1]
    assert launcher[launcher.index("--nproc-per-node") + 1] == ranks


def test_each_start_is_an_attempt_of_its_own(run: Fake) -> None:
    for attempt in ("0", "1", "2"):
        done = run("--run-dir", str(run.run_dir))
        assert run.payload()[-2:] == ["--attempt", attempt]
        assert done.stdout.startswith(f"[jobkit] start: attempt {attempt} of {run.run_dir} on ")


@pytest.mark.parametrize(
    ("left", "job_id", "cluster"),
    [
        ({"launcher": "run.sh", "job_id": "3", "pid": 1}, "17", "alps"),
        ({"launcher": "run.sh", "job_id": "3", "pid": 1}, "17", 'a"b'),
        ({"launcher": "run.sh", "job_id": "3", "pid": 1}, None, None),
        ({"launcher": "slurm", "command": ['"launcher": "run.sh"']}, "17", "alps"),  # a study's
    ],
)
def test_a_start_in_a_folder_of_a_run_sh_is_noted_there(
    run: Fake, left: dict[str, Any], job_id: str | None, cluster: str | None
) -> None:
    """Else status would tell of the process or the job of the start before."""
    run.run_dir.mkdir()
    file = run.run_dir / "job.json"
    file.write_text(json.dumps(left))
    run.tool("srun", SRUN)
    env = {"SLURM_JOB_ID": job_id} if job_id else {}
    env |= {"SLURM_CLUSTER_NAME": cluster} if cluster else {}
    assert run("--run-dir", str(run.run_dir), **env).returncode == 0
    found = json.loads(file.read_text())
    if left["launcher"] != "run.sh":
        assert found == left
        return
    known = cluster if cluster == "alps" else None  # what is no name would break the file
    assert (found["launcher"], found["job_id"], found["cluster"]) == ("run.sh", job_id, known)
    assert found["pid"] != 1 and found["pid_ns"] == pid_namespace()
    assert (found["child"] is None) == bool(job_id)  # Slurm knows of its own job
    assert [p.name for p in run.run_dir.glob("job.json*")] == ["job.json"]


@pytest.mark.parametrize("word", ["--dry-run", "--check", "--help-training"])
def test_what_only_looks_makes_no_folder(run: Fake, word: str) -> None:
    done = run(word, "--run-dir", str(run.run_dir))
    assert done.returncode == 0
    assert not run.run_dir.exists()
    assert "--attempt" not in run.payload()


def test_help_shows_its_own_options_and_where_the_trainings_are(run: Fake) -> None:
    """All that the loop over the words takes; no python is needed for it."""
    done = run("-h", "--run-dir", str(run.run_dir))
    assert (done.returncode, done.stderr) == (0, "")
    taken = set(re.findall(r"^    (--[a-z-]+)\) ", RUN.read_text(), re.MULTILINE))
    valued = re.search(
        r"^    (--nproc-per-node \|.*?)\)$", RUN.read_text(), re.MULTILINE | re.DOTALL
    )
    assert valued
    taken |= set(re.findall(r"--[a-z-]+", valued[1])) - {"--site-file"}  # the launcher's own
    assert len(taken - {"--help-training"}) == 20
    assert {option for option in taken if option not in done.stdout} == set()
    assert done.stdout.startswith("usage: bash run.sh ")
    assert run.calls() == [] and not run.run_dir.exists()


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": "7"}])
@pytest.mark.parametrize(
    ("on_path", "own", "named", "taken"),
    [
        ("1", "0", False, "own"),  # a shell that has not activated the environment
        ("0", "0", False, "other"),
        ("1", "0", True, None),  # what was named is not replaced
        ("1", "1", False, None),  # neither has torch
    ],
)
def test_the_checkouts_own_python_is_taken_where_path_has_none_with_torch(
    run: Fake, job: dict[str, str], on_path: str, own: str, named: bool, taken: str | None
) -> None:
    root = run.folder / "the checkout"
    (root / "src" / "jobkit").mkdir(parents=True)
    (root / "run.sh").write_text(RUN.read_text())
    ours = root / ".venv" / "bin" / "python"
    ours.parent.mkdir(parents=True)
    run.python.rename(ours)
    run.tool(
        "python", f'#!/bin/sh\n[ "$1" = -c ] && exit {on_path}\necho other >> "$NOTES.other"\n'
    )
    run.tool("srun", '#!/bin/bash\nuntil [[ $1 == *python ]]; do shift; done\nexec "$@"\n')
    path = f"{run.folder}:/usr/bin:/bin"
    env = run.environ(PATH=path, NO_TORCH=own, JOBKIT_PYTHON="python", **job)
    if not named:
        del env["JOBKIT_PYTHON"]
    words = ["bash", str(root / "run.sh"), "--run-dir", str(run.run_dir), "--epochs", "1"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100, cwd=root)
    note = f"jobkit: note: no python on PATH that has torch: taking {ours}\n"
    if taken is None:
        assert done.returncode == 2 and "has no torch and torchvision" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, note if taken == "own" else "")
    assert ("--attempt" in str(run.calls())) == (taken == "own")
    assert (run.folder / "notes.other").exists() == (taken == "other")


SAID = 'said {"exit_code": 0}, "exit_code": 0,'


@pytest.mark.parametrize(
    ("code", "outcome", "expected"),
    [
        ("0", "0", 0),
        ("1", "75", 75),  # the launcher knows only that a rank ended badly
        ("0", "2", 2),  # ranks end with 0 on bad input, to spare the reader a traceback
        ("9", "", 9),
        ("0", "", 0),
        ("1", '{"status": "x", "exit_code": 75}', 75),
        ("1", '{\n "status": "x",\n "exit_code":75,\n "attempt": 1\n}', 75),
        (
            "1",
            json.dumps({"reason": 'said {"exit_code": 0}, "exit_code": 0,', "exit_code": 75}),
            75,
        ),
        (
            "1",
            json.dumps({"exit_code": 75, "reason": 'said {"exit_code": 0}, "exit_code": 0,'}),
            75,
        ),
        ("1", '{"status": "x"}', 1),
        ("1", "0", 0),  # all results are there
    ],
)
def test_the_outcome_decides_the_exit_code(
    run: Fake, code: str, outcome: str, expected: int
) -> None:
    done = run("--run-dir", str(run.run_dir), CODE=code, OUTCOME=outcome)
    assert done.returncode == expected
    said = "warning: the launcher ended with code 1 after the run had recorded"
    assert (said in done.stderr) == ((code, outcome) == ("1", "0"))


@pytest.mark.parametrize(
    ("number", "outcome", "pod", "code"),
    [
        (signal.SIGTERM, "0", "", 143),
        (signal.SIGINT, "75", "", 130),
        (signal.SIGTERM, "0", "1", 0),
        (signal.SIGTERM, "75", "1", 75),
        (signal.SIGTERM, "1", "1", 143),
    ],
)
def test_a_signal_reaches_the_launcher_and_tells_in_the_code(
    run: Fake, number: signal.Signals, outcome: str, pod: str, code: int
) -> None:
    with subprocess.Popen(
        ["bash", str(RUN), "--run-dir", str(run.run_dir)],
        env=run.environ(SLEEP="1", OUTCOME=outcome, JOBKIT_POD=pod),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "asleep":
            pass
        process.send_signal(number)
        assert process.wait(100) == code
    assert "ended by TERM" in run.notes.read_text()


def test_in_an_allocation_srun_starts_the_payload(run: Fake) -> None:
    run.tool("srun", '#!/bin/bash\nprintf "%s\\0" srun "$@" CALL >> "$NOTES"\nexit 3\n')
    words = ["--nproc-per-node", "4", "--epochs", "2", "--run-dir", str(run.run_dir)]
    done = run(*words, SLURM_JOB_ID="5", SLURM_CPUS_PER_TASK="7")
    assert done.returncode == 3
    assert "--nproc-per-node has no effect in an allocation" in done.stderr
    call = run.calls()[-1]
    launcher, payload = call[: call.index(str(run.python))], call[call.index(str(run.python)) :]
    assert launcher[0] == "srun"
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=7"} <= set(launcher)
    assert payload[1:3] == ["-m", "jobkit.payload.main"]
    assert run.payload()[:2] == ["--epochs", "2"]


@pytest.mark.parametrize(
    ("code", "starts", "requeued"), [(75, 1, True), (1, 3, False), (143, 1, False), (2, 1, False)]
)
def test_in_an_allocation_only_a_crash_is_started_again(
    run: Fake, code: int, starts: int, requeued: bool
) -> None:
    """After an early stop with a checkpoint the time is nearly over: the job is requeued."""
    outcome = f'{{"exit_code": {code}, "status": "x"}}'
    run.tool(
        "srun",
        '#!/bin/bash\necho "$@" >> "$NOTES.srun"\n'
        "while (($#)); do [[ $1 != --attempt ]] || n=$2; shift; done\n"
        f"echo '{outcome}' > \"$RUN_DIR/attempts/$n/outcome.json\"\n",
    )
    run.tool("scontrol", '#!/bin/sh\necho "$@" >> "$NOTES.scontrol"\n')
    words = ["--run-dir", str(run.run_dir), "--max-restarts", "2"]
    done = run(*words, SLURM_JOB_ID="5", RUN_DIR=str(run.run_dir))
    assert done.returncode == code, done.stderr
    assert len((run.folder / "notes.srun").read_text().splitlines()) == starts
    asked = run.folder / "notes.scontrol"
    assert (asked.read_text() if asked.exists() else "") == "requeue 5\n" * requeued


def test_a_run_that_has_ended_does_not_wait_for_an_srun_that_does_not(run: Fake) -> None:
    """srun waits for a node that it cannot reach; the sleeps of 5 and 90 s are short ones here."""
    run.tool(
        "srun",
        '#!/bin/bash\nprintf \'{"exit_code": 0, "status": "ok"}\\n\' '
        '> "$RUN_DIR/attempts/0/outcome.json"\nexec /bin/sleep 60\n',
    )
    run.tool("sleep", "#!/bin/bash\nexec /bin/sleep 0.1\n")
    words = ["--run-dir", str(run.run_dir)]
    done = run(*words, SLURM_JOB_ID="5", RUN_DIR=str(run.run_dir))
    assert "the run has ended, and srun has not 90 s later" in done.stderr
    assert done.returncode == 0


def test_directives_are_read_by_sbatch() -> None:
    lines = RUN.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and line[0] != "#")
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert directives
    assert max(directives) < first_command
    assert not [line for line in lines if line.startswith("# SBATCH")]
    assert json.dumps([lines[i] for i in directives]).count("nodes=1") == 1


@pytest.mark.parametrize("name", ["comm", *sorted(p.stem for p in HPC.glob("train*.sh"))])
def test_the_ready_scripts_are_signalled_and_requeued_as_run_sh_is(name: str) -> None:
    def header(path: Path) -> set[str]:
        lines = path.read_text().split("\n#\n")[0].splitlines()
        return {line for line in lines if line.startswith("#SBATCH")}

    own = ("--nodes", "--ntasks-per-node", "--gpus-per-node", "--job-name", "--output", "--error")
    common = {x for x in header(RUN) if not x.split()[1].startswith(own)}
    assert common >= {"#SBATCH --requeue", "#SBATCH --signal=USR2@60", "#SBATCH --open-mode=append"}
    assert common <= header(HPC / f"{name}.sh")


def test_run_sh_has_the_numbers_of_the_core() -> None:
    text, signal_name = RUN.read_text(), RunSpec().stop_signal
    assert f"#SBATCH --signal={signal_name}@{WARNING_S}\n" in text
    assert f"stop_signal={signal_name}\n" in text
    assert re.findall(r"max_restarts:-([0-9]+)", text) == ["0", str(MAX_RESTARTS), "0"]
    assert f"(default {MAX_RESTARTS})" in text


@pytest.mark.needs("shellcheck")
def test_the_scripts_pass_shellcheck() -> None:
    scripts = [*ROOT.glob("*.sh"), *HPC.glob("*.sh"), ROOT / ".ci" / "run"]
    assert len(scripts) > 6
    subprocess.run(["shellcheck", "-x", *scripts], check=True)


SRUN = """#!/bin/sh
printf '%s\\n' "$@" "CPU_BIND=${SLURM_CPU_BIND-none}" > "$NOTES.srun"
"""


@pytest.mark.parametrize(
    ("variables", "said", "unsaid"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, "--gpu-bind=none", "closest"),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "closest"}, "CPU_BIND=none", "--gpu-bind"),
        ({}, "CPU_BIND=none", "--gpu-bind"),
        ({"SLURM_CPU_BIND": "x"}, "CPU_BIND=x", "--gpu-bind"),
        ({"SLURM_CPU_BIND": "x", "SLURM_STEP_ID": "4294967290"}, "CPU_BIND=none", "--gpu-bind"),
    ],
)
def test_srun_binds_no_rank_away_from_its_peers(
    run: Fake, variables: dict[str, str], said: str, unsaid: str
) -> None:
    run.tool("srun", SRUN)
    run("--run-dir", str(run.run_dir), SLURM_JOB_ID="7", **variables)
    words = (run.folder / "notes.srun").read_text()
    assert said in words and unsaid not in words


def test_what_is_a_crash_is_the_same_here_and_in_a_study() -> None:
    """Neither bad input, nor an early stop with a checkpoint, nor an end on request."""
    (codes,) = re.findall(r"case \$code in ([\d |]+)\) return 1", RUN.read_text())
    assert {int(code) for code in codes.split("|")} == {n for n in range(256) if not crashed(n)}
    assert not crashed(75) and crashed(1) and crashed(137)
