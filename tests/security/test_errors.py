"""What others wrote, in errors: one plain line on every terminal."""

import argparse
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.errors import Parser, UsageError, command, one_line
from jobkit.launch.cancel import main as cancel
from jobkit.launch.follow.status import main as status
from support.fake_study import make_plan

ESC = "\x1b]0;title\x07\x1b[2J\u202eevil\u2066\r\x9b31m\n"


def plain(text: str) -> bool:
    """Whether no character of a text controls a terminal or turns its direction."""
    return not any(
        unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF")
        or unicodedata.bidirectional(c) in ("LRI", "RLI", "FSI", "PDI")
        for c in text
    )


@given(st.text(alphabet=st.characters() | st.sampled_from(ESC)))
def test_any_error_is_one_plain_line(text: str) -> None:
    assert plain(one_line(text)) and plain(str(UsageError(text)))


@given(st.text(alphabet=st.characters(exclude_categories=("C", "Z"))))
def test_plain_text_stays(text: str) -> None:
    assert one_line(text) == text


def test_the_printed_line_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    @command
    def main(argv: object = None) -> int:
        raise UsageError(f"bad {ESC}")

    assert main([]) == 2
    with pytest.raises(SystemExit):
        Parser(prog="x").error(f"bad {ESC}")
    said = capsys.readouterr().err
    assert said.count("\n") == 2 and plain(said.replace("\n", ""))


def test_an_argument_with_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    made = Parser(prog="x")
    made.add_argument("--n", type=int)
    with pytest.raises(SystemExit):
        made.parse_args(["--n", ESC])
    assert isinstance(made, argparse.ArgumentParser)
    assert plain(capsys.readouterr().err.strip("\n"))


SPOILT = [
    ("study", {ESC: 1}),
    ("study", {"name": ESC}),
    ("study", {"strategies": [ESC]}),
    ("study", {"settings": {ESC: 1}}),
    ("runs", [{"run_id": ESC, "spec": {}}]),
    ("runs", [{"run_id": "x", "spec": {ESC: 1}}]),
]


@pytest.mark.parametrize(("key", "value"), SPOILT)
@pytest.mark.parametrize("main", [status, cancel])
def test_a_plan_with_control_characters(
    key: str, value: object, main: object, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    content = json.loads(plan.paths.plan.read_text())
    both = isinstance(value, dict) and isinstance(content[key], dict)
    content[key] = {**content[key], **value} if both else value  # type: ignore[dict-item]
    plan.paths.plan.write_text(json.dumps(content))
    main(["s"])  # type: ignore[operator]
    said = capsys.readouterr()
    assert all(plain(line) for line in (said.out + said.err).split("\n"))


def test_names_of_folders_in_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    evil = plan.paths.folder.parent / "evil\x1b[2J"
    evil.mkdir()
    (evil / "plan.json").write_text("{}")
    assert status([f"{ESC}x"]) == 2
    assert plain(capsys.readouterr().err.strip("\n"))


def test_a_launcher_that_is_named_with_control_characters() -> None:
    from jobkit.launch.lock import busy

    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    Path(plan.paths.launcher).write_text(json.dumps({"pid": ESC, "host": ESC}))
    assert plain(str(busy(plan.paths)))
