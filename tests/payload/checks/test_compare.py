"""Runs compared bit by bit."""

import json

import torch

from jobkit.checks.compare import are_same, main
from support.rigs import NO_BREAKDOWN

RUN = ("--dataset", "synthetic", "--train-samples", "64", "--test-samples", "32", *NO_BREAKDOWN)
RUN += ("--epochs", "2")
RUN += ("--global-batch-size", "16", "--model", "mlp", "--checkpoint-every", "epoch")


def test_any_bit_counts_and_nothing_else() -> None:
    nan, one = torch.tensor([float("nan"), 0.0]), torch.tensor([1.0])
    assert are_same({"a": nan, "b": one}, {"b": one.clone(), "a": nan.clone()})
    for other in (one.double(), one[None], -one):
        assert not are_same({"a": one}, {"a": other})
    assert not are_same({"a": nan}, {"a": torch.tensor([float("nan"), -0.0])})
    assert not are_same({"a": one}, {"b": one}) and not are_same({"a": one}, {"a": one, "b": one})


def test_runs_are_compared_by_their_newest_checkpoints(forge, tmp_path, capsys) -> None:
    first, second = (forge(n, *RUN).paths.folder for n in (1, 1))
    other = forge(1, *RUN, "--seed", "1").paths.folder
    main([*map(str, (first, second, other, tmp_path))])
    found = [json.loads(line)["same"] for line in capsys.readouterr().out.splitlines()]
    assert found == [True, False, None]
