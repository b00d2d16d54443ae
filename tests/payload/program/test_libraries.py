"""The real libraries on two ranks with Gloo, measured by the hook, and where their time goes.

`make test` has Accelerate alone, as the imports of the others cost more than all the rest.
"""

import importlib.util
from pathlib import Path

import pytest

from jobkit.analysis.collect.why import breakdown
from support import needs
from support.training_programs import LEAP, PROGRAMS
from support.warm_programs import Warm

LEAP_S = 1000.0  # of each batch of evaluation, which must not count


@pytest.mark.long
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_framework_is_measured_on_two_ranks(
    library: str, libraries: Warm, tmp_path: Path
) -> None:
    check(library, libraries, tmp_path)


def test_accelerate_is_measured_on_two_ranks(warm: Warm, tmp_path: Path) -> None:
    check("accelerate", warm, tmp_path)


def check(library: str, warm: Warm, tmp_path: Path) -> None:
    """The library measures what it trains, on both ranks."""
    if importlib.util.find_spec(library) is None:
        needs.unavailable(f"{library} is not installed (make venv, or pip install '.[adapters]')")
    ran = warm.run(tmp_path, LEAP + PROGRAMS[library], ranks=2, JOBKIT_WHY="5")
    assert ran.codes == [0, 0], ran.err
    for rank in range(2):
        # 320 samples in batches of 4, of which 2 are one step, on 2 ranks, for 2 epochs: 40 steps.
        # The 7 at each of two places where steps may be profiled are not in the rate.
        assert ran.sums(rank) == (40 - 14, 8 * 26), ran.out
        windows = ran.records("window", rank)
        wall = sum(w["wall_s"] for w in windows if not w["warmup"])
        assert wall < LEAP_S, "a batch of evaluation is in the time"
        assert sum(w["paused_s"] for w in windows) >= LEAP_S
        assert all(w["data_wait_s"] <= w["wall_s"] for w in windows)
    found = breakdown([*ran.whys(0), *ran.whys(1)])
    assert found["ranks"] == 2 and ran.whys(0)[0]["steps"] == 5
    assert min(found[f"{name}_s"] for name in ("compute", "communication", "data_wait", "host")) > 0
    assert "gloo:all_reduce" in {name for _, name, *_ in ran.whys(0)[0]["collectives"]}
    start = ran.records("run_start")[0]
    assert (start["source"], start["unit"], start["world_size"]) == ("auto", "samples", 2)
    assert ["[METRIC]" in out for out in ran.out] == [True, False]
