"""Runs compared bit by bit."""

import json

import torch

from jobkit.checks.compare import differing, main
from support.rigs import NO_BREAKDOWN

RUN = ("--dataset", "synthetic", "--train-samples", "64", "--test-samples", "32", *NO_BREAKDOWN)
RUN += ("--epochs", "2")
RUN += ("--global-batch-size", "16", "--model", "mlp", "--checkpoint-every", "epoch")


def test_any_bit_counts_and_nothing_else() -> None:
    nan, one = torch.tensor([float("nan"), 0.0]), torch.tensor([1.0])
    assert differing({"a": nan, "b": one}, {"b": one.clone(), "a": nan.clone()}) == []
    assert differing({"a": nan}, {"a": torch.tensor([float("nan"), -0.0])}) == ["a"]
    assert differing({"a": one}, {"a": one.double()}) == ["a"]
    assert differing({"a": one}, {"a": one[None]}) == ["a"]
    assert differing({"a": one}, {"b": one}) == ["a", "b"]


def test_runs_are_compared_by_their_newest_checkpoints(forge, tmp_path, capsys) -> None:
    first, second = (forge(n, *RUN).paths.folder for n in (1, 1))
    other = forge(1, *RUN, "--seed", "1").paths.folder
    assert main([*map(str, (first, second, other, tmp_path))]) == 4
    same, differs, absent = map(json.loads, capsys.readouterr().out.splitlines())
    assert (same["run"], same["same"], same["differing"]) == (str(second), True, [])
    assert differs["same"] is False and any(n.startswith("model.") for n in differs["differing"])
    assert absent["same"] is None and "no checkpoint" in absent["fault"]
    assert main([str(first), str(second)]) == 0
    capsys.readouterr()
    assert main([str(tmp_path), str(first)]) == 2
    said = capsys.readouterr()
    assert not said.out and "the reference" in said.err
