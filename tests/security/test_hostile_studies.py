"""Studies that somebody else made: no command executes, signals or writes for them, or breaks."""

import contextlib
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.font_manager  # noqa: F401  its search for fonts is not a command's
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.analysis.cli import collect_main
from jobkit.errors import UsageError, command, nearest, one_line
from jobkit.launch.cancel import main as cancel
from jobkit.launch.cli import main as launch
from jobkit.launch.local import busy
from jobkit.launch.site import Site
from jobkit.launch.status import main as status
from jobkit.program.lines import encode
from jobkit.spec.study import Plan
from support.fake_study import make_plan, whole_run
from support.hostile import SECRET, in_child, plain, snapshot

PRECIOUS = f"alias ll='ls -l' # {SECRET}-of-another-file\n"
ESC = "\x1b]0;title\x07\x1b[2J\u202eevil\u2066\r\x9b31m\n"
WORDS = ["", "..", "-x", "=1+1", ESC, "\x00", "x" * 70_000, "$(touch ${HOME}/pwned)"]
NUMBERS = [0, -1, 2**63, 10**400, 1e308, float("nan"), float("inf"), True, 1.5, 99999999999]
VALUES = [*WORDS, *NUMBERS, None, [], [[1]], {}, {"x": 1}, {ESC: [ESC]}]
OF_STUDY = ("plan.json", "launcher.json", ".launcher.lock", "results.csv")
OF_RUN = ("job.json", "submission.json", "spec.json", "train.log", "slurm.log", "metrics/0.jsonl")
OF_RUN += ("attempts/0/outcome.json", "attempts/7", "metrics", "attempts")
KEYS = "run_id study name spec runs notes settings sweep strategies gpus repeats lr pid pid_start "
KEYS += "host job_id run_ids started ended submitted exit_code child first_attempt status reason "
KEYS += "strategy shared launcher command"
FILES = [b"", b"\xff\xfe" * 99, b"[" * 100_000, b"\n" * 3_000_000, b"null", b"{}", b"1" * 9999]
FILES += [f"[METRIC] epoch={value}\n".encode() for value in NUMBERS]
LINKS = ("/dev/zero", "OUTSIDE/precious", "OUTSIDE", "OUTSIDE/new", ".")


def change(plan: Plan, outside: Path, rng: random.Random) -> None:
    """Make one change to a study: a file of another kind or content, a value, a mode, a name."""
    names = [*OF_STUDY, *(f"{next(iter(plan.runs))}/{name}" for name in OF_RUN), "figures"]
    path = plan.paths.folder / rng.choice(names)
    way = rng.choice(("value", "value", "value", "file", "link", "mode", "name", "record"))
    if way == "value":
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(path.read_bytes())
            key, value = rng.choice(KEYS.split()), rng.choice(VALUES)
            inner = [content, content.get("study"), content.get("spec"), *content.get("runs", [])]
            rng.choice([x for x in inner if isinstance(x, dict)])[key] = value
            path.write_text(json.dumps(content))
    elif way == "name":
        with contextlib.suppress(OSError, ValueError):
            (plan.paths.folder / rng.choice(WORDS[2:6]) / "metrics").mkdir(parents=True)
    elif way == "mode" and path.exists():
        path.chmod(rng.choice((0o777, 0o000, 0o4755)))
    elif way == "record" and path.is_file():
        record = {"v": 1, "run_id": next(iter(plan.runs)), "attempt": 0, "seq": rng.randrange(99)}
        record |= {"kind": rng.choice(["epoch", "run_start", "run_end", "message"])}
        record |= {k: rng.choice(VALUES) for k in ("epoch", "val_loss", "t", "text", "spec")}
        with path.open("a") as file:
            file.write(f"{'[METRIC] ' * (path.suffix == '.log')}{encode(record)}\n")
    elif way in ("file", "link"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if way == "link":
            path.symlink_to(rng.choice(LINKS).replace("OUTSIDE", str(outside)))
        else:
            path.write_bytes(rng.choice(FILES))


def commands(name: str) -> object:
    mains: list[tuple[Any, list[str]]] = [(status, []), (status, ["--json"]), (collect_main, [])]
    codes = [main([name, *words]) for main, words in [*mains, (cancel, [])]]
    words = ["--study", "demo", "--name", name, "--site", "local", "--no-wait"]
    codes.append(launch([*words, "--dry-run"]))
    return json.dumps([int(code) for code in codes])


SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_command_harms_whoever_looks_at_a_study(seed, tmp_path, monkeypatch) -> None:
    rng = random.Random(seed)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text(PRECIOUS)
    for name, value in (("WANDB_API_KEY", SECRET), ("PATH", "/nowhere"), ("HOME", str(outside))):
        monkeypatch.setenv(name, value)
    plan = make_plan("s", strategies=("ddp",), gpus=(1, 2), settings={"epochs": 2})
    for run_id in plan.runs if seed % 2 else ():
        whole_run(plan, run_id)
    for _ in range(rng.randint(1, 5)):
        change(plan, outside, rng)
    kept = snapshot(outside)
    done = in_child(lambda: commands("s"))
    assert done.faults == []
    assert set(json.loads(str(done.code))) <= {0, 1, 2, 3}, done.out
    assert snapshot(outside) == kept
    assert holding(plan.paths.folder, SECRET) == [] and SECRET not in done.out


def holding(folder: Path, marker: str) -> list[Path]:
    files = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    return [p for p in files if marker.encode() in p.read_bytes()]


def test_the_watch_sees_what_it_looks_for() -> None:
    """The test above can fail: each fault is noticed."""

    def harm() -> object:
        for act in (lambda: os.kill(os.getppid(), 15), lambda: subprocess.run(["touch", "x"])):
            with contextlib.suppress(OSError):
                act()
        print("\x1b[2J", len(bytearray(random.randbytes(1)) * (600 << 20)))
        raise RuntimeError("x")

    done = in_child(harm)
    assert done.signalled and done.started == ["touch"] and "RuntimeError" in done.error
    assert len(done.faults) == 5


JOB = ("launcher", "job_id", "pid", "pid_start", "host", "started", "ended", "exit_code", "child")
JOB += ("first_attempt", "command", "submitted", "shared")


@pytest.mark.parametrize("name", ["launcher.json", "RUN/job.json", "RUN/submission.json"])
def test_any_value_in_a_record_of_a_job_is_passed_over(name, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    run_id = next(iter(plan.runs))
    whole_run(plan, run_id)
    folder = plan.paths.folder
    for path in ("attempts/0/outcome.json", "metrics/0.jsonl"):
        (folder / run_id / path).unlink()
    good = {"launcher": "slurm", "job_id": "7", "started": 2.0, "submitted": 1.0, "pid": 1}
    (folder / run_id / "job.json").write_text(json.dumps(good))
    for key in (*JOB, "run_ids", "at_once", "folder"):
        for value in [None, "x", -1, 1.5, 10**400, True, [[1]], {"x": 1}, "\x1b"]:
            (folder / name.replace("RUN", run_id)).write_text(json.dumps({**good, key: value}))
            assert status(["s"]) in (0, 3), (key, value)
    assert all(plain(line) for line in "".join(capsys.readouterr()).split("\n"))


@pytest.mark.parametrize("main", [status, cancel, collect_main])
def test_a_name_that_is_none_is_one_line(main, capsys) -> None:
    for name in ("x" * 5000, "a\0b", "a\nb", "/" + "x/" * 3000):
        assert main([name]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@given(st.text(alphabet=st.characters() | st.sampled_from(ESC)))
def test_any_error_is_one_plain_line(text: str) -> None:
    assert plain(one_line(text)) and plain(str(UsageError(text)))
    assert not {*"\u2028\u2029\u2066\ud800\x85"} & {*one_line(text)}


def test_what_others_wrote_is_printed_plain(capsys: pytest.CaptureFixture[str]) -> None:
    @command
    def main(argv: object = None) -> int:
        raise UsageError(f"bad {ESC}")

    assert main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(plain(line) for line in said.split("\n"))
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    plan.paths.launcher.write_text(json.dumps({"pid": ESC, "host": ESC}))
    assert plain(str(busy(plan.paths)))
    assert one_line("plain text, \u00e4 and \u4e16") == "plain text, \u00e4 and \u4e16"


def test_small_texts_that_would_cost_much() -> None:
    assert nearest("x" * 101, ["x" * 100]) == "" != nearest("epoch", ["epochs"])
    for name in ("image", "python"):
        with pytest.raises(UsageError, match="begins as an option"):
            Site(name="x", container="apptainer", **{"image": "a.sif", name: "--bind=/:/host"})
