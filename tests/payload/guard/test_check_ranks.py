"""--check-ranks on real ranks: a bit that flips on one rank ends the run and is named."""

from pathlib import Path

import pytest

from support.rigs import SMALL, Start

FLIPS = """
import os, torch
from torch import nn

STEP, calls = torch.optim.SGD.step, []

def step(self, *args, **kwargs):
    STEP(self, *args, **kwargs)
    calls.append(1)
    if len(calls) == 7 and os.environ["RANK"] == "1":  # as a fault of the memory would, once
        weight = self.param_groups[0]["params"][2]
        getattr(weight, "_local_tensor", weight).data[0, 0] += 0.5

torch.optim.SGD.step = step

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3072, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.second(self.first(x.flatten(1)).relu())
"""
RUN = (*SMALL, "--epochs", "1", "--global-batch-size", "32", "--warmup-iterations", "1")
RUN += ("--model", "flips:Model", "--check-ranks", "5")


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "flips.py").write_text(FLIPS)
    return str(tmp_path)


@pytest.mark.parametrize(
    "words", [("--strategy", "ddp"), ("--strategy", "fsdp", "--fsdp-hybrid-replicas", "2")]
)
def test_the_rank_that_differs_is_named(forge: Start, own: str, words: tuple[str, ...]) -> None:
    done = forge(2, *RUN, *words, cwd=own)
    assert done.codes == [4, 4], done.out
    assert done.outcome is not None
    assert done.outcome["exit_code"] == 4
    assert "after iteration 10 rank 1 has other parameters than rank 0" in done.outcome["reason"]
    assert "second.weight first" in done.outcome["reason"]
    assert "Traceback" not in done.out


def test_what_is_on_one_rank_only_is_not_compared(forge: Start, own: str) -> None:
    done = forge(2, *RUN, "--strategy", "fsdp", cwd=own)
    assert done.codes == [0, 0], done.out
    assert "no parameter is on two ranks: nothing is compared" in done.out
