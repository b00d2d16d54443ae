"""On a GPU a step's time on the host is that of its issue: windows have no percentiles there."""

import json
from pathlib import Path

import pytest

from jobkit.program import windows


@pytest.mark.parametrize("gpu", [False, True])
def test_percentiles_are_of_the_cpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(windows, "on_gpu", lambda: gpu)
    env = {"JOBKIT_RUN_DIR": str(tmp_path), "JOBKIT_METER": "0"}
    meter = windows.Meter("images", None, 0, "meter", None, env)
    meter.begin(0.0)
    for _ in range(3):
        meter.step(8, {})
    meter.end("ok", "")
    lines = (tmp_path / "metrics" / "0.jsonl").read_text().splitlines()
    found = [r for r in map(json.loads, lines) if r["kind"] == "window"]
    assert sum(r["steps"] for r in found) == 3
    names = ("step_p50_s", "step_p95_s", "step_p99_s", "step_max_s")
    assert {name in r for r in found for name in names} == {not gpu}
