"""Placeholders of a command: arithmetic of whole numbers over names, and nothing else."""

import pytest

from jobkit.errors import UsageError
from jobkit.spec.command import fill, resolve, resolve_all

NAMES = {"ranks": 8, "nodes": 2, "batch": 12, "lr": 0.1, "tag": "a b", "on": True}


def test_what_is_replaced() -> None:
    for text, filled in (
        ("--batch={batch}", "--batch=12"),
        ("{ batch }", "12"),
        ("{40 // ranks}x{ranks-1}", "5x7"),
        ("{96 / ranks}", "12"),
        ("{(ranks + 2) * -3 % 7}", "5"),
        ("{lr} {tag} {on}", "0.1 a b True"),
        ('{{"a": {batch}}}', '{"a": 12}'),
        ("$HOME\n'é'", "$HOME\n'é'"),
        ("", ""),
    ):
        assert fill(text, NAMES) == filled


def test_what_is_refused_in_one_line() -> None:
    for text, said in [
        ("{rank}", "unknown name 'rank'; did you mean 'ranks'?"),
        ("{x}", "unknown name 'x' (known: ranks, nodes"),
        ("{100 / ranks}", "100 / 8 is not a whole number (// would round down)"),
        ("{1 // (ranks - 8)}", "divides by zero"),
        ("{lr * 2}", "lr is 0.1, and arithmetic is of whole numbers"),
        ("{on + 1}", "on is True"),
        ("{tag * 2}", "tag is 'a b'"),
        ("{2 ** 9}", "not arithmetic of"),
        ("{1.5}", "not arithmetic of"),
        ("{__import__('os').system('touch hacked')}", "not arithmetic of"),
        ("{ranks.__class__}", "not arithmetic of"),
        ("{}", "not arithmetic of"),
        ("{" + "1+" * 500 + "1}", "not arithmetic of"),
        ('{"a": 1}', "not arithmetic of"),
        ("{{ranks}", "a single '}': write }} for a brace"),
        ("a{", "a single '{': write {{ for a brace"),
    ]:
        with pytest.raises(UsageError) as raised:
            fill(text, NAMES)
        assert said in str(raised.value) and "\n" not in str(raised.value)
        assert len(str(raised.value)) < 500


def test_a_text_that_is_one_placeholder_keeps_its_type() -> None:
    assert resolve("{batch * 2}", NAMES) == 24
    assert resolve("{on}", NAMES) is True
    assert resolve("{batch} ", NAMES) == "12 "
    assert resolve(1.5, NAMES) == 1.5


def test_parameters_may_name_each_other() -> None:
    given = {"a": "{b * 2}", "b": "{48 / ranks}", "c": "x{a}"}
    assert resolve_all(given, NAMES) == {"a": 12, "b": 6, "c": "x12"}
    with pytest.raises(UsageError, match="parameters a, b: each needs"):
        resolve_all({"a": "{b}", "b": "{a}"}, NAMES)
    with pytest.raises(UsageError, match=r"parameter a: .*unknown name 'z'"):
        resolve_all({"a": "{z}"}, NAMES)
