"""Where the keys of an EDF stand; and that no text at all breaks the check."""

import json
import tomllib
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobkit.launch.edf.check import check
from jobkit.launch.edf.rules import TYPES
from jobkit.launch.edf.text import LONGEST_STATEMENT, key_lines


def test_lines_of_keys() -> None:
    text = '# c\n"a b".c = """\nx = 1\n"""\n\n[t.u]  # c\n'
    text += "v = [  # c\n\n  1, 2,\n  [3]\n]\nw = {k = 1}\n"
    assert key_lines(text) == {
        ("a b",): 2,
        ("a b", "c"): 2,
        ("t",): 6,
        ("t", "u"): 6,
        ("t", "u", "v"): 7,
        ("t", "u", "v", 0): 9,
        ("t", "u", "v", 1): 9,
        ("t", "u", "v", 2): 10,
        ("t", "u", "v", 2, 0): 10,
        ("t", "u", "w"): 12,
        ("t", "u", "w", "k"): 12,
    }


def test_a_statement_without_end_is_given_up() -> None:
    endless = "a = 1\nb = [\n" + "1,\n" * (3 * LONGEST_STATEMENT) + "]\nc = 1\n"
    lines = key_lines(endless)
    assert (lines[("a",)], lines[("b",)]) == (1, 2)
    assert ("c",) not in lines


WORDS = """image mounts env annotations com.hooks.cxi.enabled base_environment devices [env] [[env]]
${A} $ ./ = [ ] { } , " ' : / \\ \\u0000 # . 1 0xFF true inf 1979-05-27 a"""
PIECES = st.sampled_from([*WORDS.split(), '"""', "\n", "\r", "\0", " "])
STRINGS = st.one_of(st.text(st.characters(min_codepoint=32, max_codepoint=126)), PIECES)
LEAVES = st.one_of(STRINGS, st.booleans(), st.integers(), st.floats(allow_nan=False))
VALUES = st.recursive(LEAVES, lambda v: st.lists(v) | st.dictionaries(STRINGS, v), max_leaves=6)
NAMES = st.sampled_from([*TYPES, "com", "x y"])


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + "".join(f"\n  {as_toml(v)}," for v in value) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value)


@settings(deadline=None)  # a busy machine is no failure
@given(st.dictionaries(NAMES, VALUES))
def test_keys_are_located_and_no_value_breaks_the_check(data: dict[str, object]) -> None:
    text, lines = "", {}
    for name, value in data.items():
        lines[name] = text.count("\n") + 1
        text += f"{json.dumps(name)} = {as_toml(value)}\n"
    assert tomllib.loads(text) == data
    located = key_lines(text)
    assert {name: located[(name,)] for name in data} == lines
    for finding in check(text, Path("/nowhere"), {"HOME": "/nowhere"}):
        assert 1 <= finding.line <= max(text.count("\n"), 1)


@settings(deadline=None)  # a busy machine is no failure
@given(st.one_of(st.text(), st.lists(PIECES).map("".join)))
@example('image = "./\\u0000"\nmounts = ["./\\u0000:/a:sqsh"]\nbase_environment = "\\u0000"')
@example(f'mounts = ["/{"a" * 5000}:/a:sqsh"]\nbase_environment = "./{"a" * 5000}"')
@example("image = " + "[" * 200 + "]" * 200)
@example("env = {A = 0x" + "f" * 9000 + "}\nannotations = 0x" + "f" * 9000)
@example("[annotations.com.hooks.cxi.enabled.x]\n[[mounts]]\n[[env]]\n")
@example("[env]\nA = nan\nB = -inf\nC = 1979-05-27\nD = 07:00:00\n")
@example("base_environment = [[]]\nmounts = [{}]\nannotations = {a = []}")
def test_no_text_breaks_the_check(text: str) -> None:
    for finding in check(text, Path("/nowhere"), {"HOME": "/nowhere"}):
        assert 1 <= finding.line <= text.count("\n") + 1
        assert finding.severity in ("error", "warning")
