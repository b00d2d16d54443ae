"""Studies that somebody else made: what stands in their files neither acts nor breaks a command.

It never becomes a command, a path, a tag or a formula.
"""

import csv
import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.analysis.cli import collect_main, plot_main
from jobkit.errors import UsageError, one_line
from jobkit.launch.command import job_command, local_command
from jobkit.launch.local import busy
from jobkit.launch.status import main as status
from jobkit.spec.runspec import RunSpec
from support import fake_study
from support.fake_study import FakeRun, logs, make_plan, whole_run
from support.hostile import in_child, plain

ESC = "\x1b]0;title\x07\x1b[2J\u202eevil\u2066\r\x9b31m\n"
VALUES = [None, "x", ESC, -1, 1.5, 10**400, True, [[1]], {"x": 1}]
KEYS = "launcher job_id pid pid_start host started ended exit_code child first_attempt command "
KEYS += "submitted shared run_ids"


@pytest.mark.parametrize("name", ["launcher.json", "RUN/job.json", "RUN/submission.json"])
def test_any_value_in_a_record_of_a_job_is_passed_over(name, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    (run_id,) = plan.runs
    folder = whole_run(plan, run_id).paths.folder
    for path in ("attempts/0/outcome.json", "metrics/0.jsonl"):
        (folder / path).unlink()
    good = {"launcher": "slurm", "job_id": "7", "started": 2.0, "submitted": 1.0, "pid": 1}
    (folder / "job.json").write_text(json.dumps(good))

    def look() -> None:
        for key, value in itertools.product(KEYS.split(), VALUES):
            path = plan.paths.folder / name.replace("RUN", run_id)
            path.write_text(json.dumps({**good, key: value}))
            assert status(["s"]) in (0, 3), (key, value)

    assert in_child(look).faults == []


@given(st.text(alphabet=st.characters() | st.sampled_from(ESC)))
def test_any_error_is_one_plain_line(text: str) -> None:
    assert plain(one_line(text)) and plain(str(UsageError(text)))
    assert not {*"\u2028\u2029\u2066\ud800\x85"} & {*one_line(text)}


def test_what_others_wrote_is_printed_plain() -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    plan.paths.launcher.write_text(json.dumps({"pid": ESC, "host": ESC}))
    assert plain(str(busy(plan.paths)))
    assert one_line("plain text, \u00e4 and \u4e16") == "plain text, \u00e4 and \u4e16"


HOSTILE = {
    "substitution": "$(touch pwned)",
    "backticks": "`touch pwned`",
    "separator": "x; touch pwned",
    "newline": "x\ntouch pwned",
    "quote": "x' touch pwned '",
    "climb": "../../pwned",
    "script": "<script>alert(1)</script>",
    "formula": '=HYPERLINK("http://example.com")',
    "math": r"$\frac{$ and $_$",
    "escape": "\x1b]0;pwned\x07\x1b[2J",
    "surrogate": "caf\udce9",
}
# All of them at once, as a formula.
FORMULA = f"={HOSTILE['script']} " + " ".join(HOSTILE.values())


@pytest.mark.parametrize("evil", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("setting", ["model", "dataset", "data_dir"])
def test_a_setting_is_refused_or_a_word(evil, setting, tmp_path, monkeypatch) -> None:
    """One word of every command."""
    monkeypatch.chdir(tmp_path)
    value = {"model": f"a.b:{evil}", "dataset": f"folder:{evil}"}.get(setting, evil)
    try:
        spec = RunSpec(strategy="ddp", **{setting: value})
    except UsageError as error:
        assert "\n" not in str(error)
        return
    paths = make_plan(strategies=("ddp",), gpus=(1,)).paths.run("r")
    for words in (local_command(spec, paths.folder), job_command(spec, paths, False)):
        assert value in words
        line = shlex.join(words)
        assert "\n" not in line  # it also stands in comments
        done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True)
        assert done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1] == words
    assert not Path("pwned").exists()


def test_what_jobs_wrote_is_text_in_every_product(tmp_path, monkeypatch, capsys) -> None:
    """Jobs told of a formula, a tag and more in every text that they could write."""
    monkeypatch.chdir(tmp_path)
    start = fake_study.start_fields
    texts = dict.fromkeys(("device", "node_list", "git_commit", "job_id"), FORMULA)
    texts |= {"versions": {"python": FORMULA, "torch": FORMULA}}
    monkeypatch.setattr(fake_study, "start_fields", lambda spec: start(spec) | texts)
    plan = make_plan(strategies=("ddp",), gpus=(1, 2), settings={"model": "a.b:c"}, repeats=2)
    bad, *good = plan.runs
    for run_id in good:
        whole_run(plan, run_id)
    run = FakeRun(plan.paths.folder, bad, plan.runs[bad]).begin()
    run.writer.write("message", level="warning", text=FORMULA)
    run.print(FORMULA.replace("\udce9", "?"))
    run.writer.write("epoch", epoch=2, values={"=cmd": 1, FORMULA: "@x"})
    run.train(0, 1).end("failed", FORMULA, 1)
    assert collect_main(["s"]) == 3
    assert plot_main(["s"]) == 0
    said = capsys.readouterr()
    assert "\x1b]" not in said.out + said.err
    folder = logs() / "s"
    assert (folder / "results.csv").read_text().count("\n") == len(plan.runs) + 1
    for file in folder.rglob("*.csv"):
        cells = [c for row in csv.reader(file.open(newline="", encoding="utf-8")) for c in row]
        assert not [c for c in cells if c.startswith(("=", "+", "@"))]
        assert not [c for c in cells if c.startswith("-") and not re.fullmatch(r"-[\d.e-]+", c)]
        assert not [c for c in cells if set(c) & {"\x1b", "\n", "\r", "\x07"}]
    pages = (folder / name for name in ("report.html", "scaling.md", "scaling.tex"))
    for file in (*pages, *folder.glob("figures/*.svg")):
        assert "<script" not in file.read_text(encoding="utf-8").replace("\\<", "")
    assert not list(folder.parent.parent.rglob("*pwned*"))
