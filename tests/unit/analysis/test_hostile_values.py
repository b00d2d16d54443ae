"""What others wrote into a plan or a log never becomes a command, a path, a tag or a formula."""

import csv
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from jobkit.analysis.cli import collect_main, plot_main
from jobkit.errors import UsageError
from jobkit.launch.command import job_command, local_command
from jobkit.spec.runspec import RunSpec
from support import fake_study
from support.fake_study import FakeRun, logs, make_plan, whole_run

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


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("evil", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("setting", ["model", "dataset", "data_dir"])
def test_a_setting_is_refused_or_one_word_of_every_command(evil: str, setting: str) -> None:
    value = {"model": f"a.b:{evil}", "dataset": f"folder:{evil}"}.get(setting, evil)
    try:
        spec = RunSpec(strategy="ddp", **{setting: value})
    except UsageError as error:
        assert "\n" not in str(error)
        return
    paths = make_plan(strategies=("ddp",), gpus=(1,)).paths.run("r")
    for command in (local_command(spec, paths.folder), job_command(spec, paths, False)):
        assert value in command
        line = shlex.join(command)
        assert "\n" not in line  # it also stands in comments
        done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True)
        assert done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1] == command
    assert not Path("pwned").exists()


def test_what_jobs_wrote_is_text_in_every_product(monkeypatch, capsys) -> None:
    """Jobs told of a formula, a tag and more in every text that they could write."""
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
    for file in (folder / "report.html", *folder.glob("figures/*.svg")):
        assert "<script" not in file.read_text(encoding="utf-8")
    for name in ("scaling.md", "scaling.tex"):
        assert "<script" not in (folder / name).read_text(encoding="utf-8").replace("\\<", "")
    assert not list(folder.parent.parent.rglob("*pwned*"))
