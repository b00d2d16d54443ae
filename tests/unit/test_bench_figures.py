"""The figures that `make bench` keeps: found in what the benchmarks print, and compared."""

import json

import pytest

from bench.figures import BENCHES, FIGURES, changes, found_in, key_of
from support.checkout import ROOT

PEERS = """fp32, 1 rank      images/s   first step      CPU   ours / it: rate   start     CPU
  ours             1218       4.10 s   12.0 s
  plain             666       4.20 s   20.0 s               1.83    0.98    0.60
  rate: 1.83 times plain; to reach 1.9: missed
  start: 0.98 times plain; at most 1: reached
fp32, 2 ranks     images/s   first step      CPU   ours / it: rate   start     CPU
  rate: 1.86 times plain; to reach 1.9: missed
  start: 1.02 times plain; at most 1: missed
"""


def test_figures_are_found_in_what_is_printed() -> None:
    """Of several tables each figure is that of its own; numbers may have commas."""
    assert found_in("peers", PEERS) == {
        "peers: fp32, 1 rank: rate": 1.83,
        "peers: fp32, 1 rank: start": 0.98,
        "peers: fp32, 2 ranks: rate": 1.86,
        "peers: fp32, 2 ranks: start": 1.02,
    }
    assert found_in("meter", "meter: 1,003.2 us per step, 0.03% of a step of 10 ms\n") == {
        "meter: meter, us a step": 1003.2
    }
    assert found_in("meter", PEERS) == {}


def test_figures_of_the_documents_are_found() -> None:
    """The throughput table of the documents is as the program prints it: all but bf16 or none."""
    text = (ROOT / "docs/benchmarks.md").read_text()
    for bench in ("throughput", "studies", "claims", "truth", "rehearse", "wide", "inference"):
        found = found_in(bench, text)
        assert len(found) == sum(figure.bench == bench for figure in FIGURES), bench


@pytest.mark.parametrize(
    ("name", "kept", "now", "lost"),
    [
        ("throughput: ddp 2 ranks / 1", 1.9, 1.72, False),
        ("throughput: ddp 2 ranks / 1", 1.9, 1.70, True),
        ("meter: meter, us a step", 3.0, 3.2, False),
        ("meter: meter, us a step", 3.0, 3.4, True),
        ("meter: meter, us a step", 3.0, 1.0, False),
        ("step_model: ddp: 8 ranks off by, %", 5.0, 15.4, False),  # ten points are chance
        ("step_model: ddp: 8 ranks off by, %", 5.0, 15.6, True),
        ("formats: compile / default", 0.9, 0.1, False),  # neither is better
    ],
)
def test_a_loss_is_seen_in_the_right_direction(
    name: str, kept: float, now: float, lost: bool
) -> None:
    """Rates are lost when they fall, costs when they rise, by more than the tolerance."""
    assert list(changes({name: now}, {name: kept}, 0.1)) == [(name, now, kept, lost)]
    assert list(changes({name: now}, {}, 0.1)) == [(name, now, None, False)]


def test_kept_figures_are_those_that_are_made() -> None:
    """Every kept figure has a name that a benchmark makes, and every benchmark is there."""
    kept = json.loads((ROOT / "tests/bench/kept.json").read_text())
    names = {f"{figure.bench}: {figure.name}" for figure in FIGURES}
    assert all(set(one["figures"]) <= names for one in kept.values())
    files = {"rehearse": "src/jobkit/rehearse/cli.py"}
    assert all((ROOT / files.get(b, f"tests/bench/{b}.py")).exists() for b in BENCHES)
    assert all(set(one.get("seconds", {})) <= {*BENCHES} for one in kept.values())
    assert key_of({"processor": "X", "cores": 2}) == "X, 2 cores"
