"""Studies that somebody else made: what stands in their files neither acts nor breaks a command."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.errors import UsageError, command, one_line
from jobkit.launch.local import busy
from jobkit.launch.status import main as status
from support.fake_study import make_plan, whole_run
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
