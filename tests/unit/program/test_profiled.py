"""When steps are profiled, and that an error in it ends no training."""

import contextlib
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from jobkit.program import why, windows
from support.records import records_of


class Recorder:
    """Stands for torch's profiler: its calls may fail."""

    def __init__(self) -> None:
        self.fails, self.calls = dict[str, int](), dict[str, int]()
        self.running, self.marks = False, list[int]()
        self.profiler = self.kineto_results = self

    def _call(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.fails.get(name) == self.calls[name]:
            raise RuntimeError(f"{name} failed")

    def start(self) -> None:
        self._call("start")
        self.running, self.marks = True, []

    def stop(self) -> None:
        self._call("stop")
        self.running = False

    def save(self, path: str) -> None:
        self._call("save")
        Path(path).write_text("{}")

    def events(self) -> list:
        self._call("events")
        return [SimpleNamespace(name=lambda: "jobkit: step", start_ns=lambda at=at: at,
                                duration_ns=lambda: 1) for at in self.marks]  # fmt: skip

    @contextlib.contextmanager
    def record_function(self, name: str):
        self._call("record_function")
        self.marks.append(len(self.marks) * 1_000_000)
        yield


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    profile = type("profile", (), {"_prepare_trace": lambda self: None})
    inner = SimpleNamespace(profile=profile, record_function=made.record_function)
    kinds = SimpleNamespace(CPU=0, CUDA=1)
    torch = SimpleNamespace(__version__="0", get_num_threads=lambda: 1)
    torch.autograd = SimpleNamespace(profiler=inner, _profiler_enabled=lambda: False)
    torch.profiler = SimpleNamespace(profile=lambda **_: made, ProfilerActivity=kinds)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(windows, "watch", lambda *_: None)
    return made


def started(folder: Path, **env: str) -> windows.Meter:
    own = {"JOBKIT_RUN_DIR": str(folder), "WORLD_SIZE": "1", "JOBKIT_WARMUP_STEPS": "2", **env}
    meter = windows.Meter("images", "meter", own)
    meter.begin(0.0)
    return meter


def train(folder: Path, steps: int, **env: str) -> None:
    meter = started(folder, **env)
    for _ in range(steps):
        meter.step(8)
    meter.end("ok", "")


def written(folder: Path, name: str, kind: str) -> list[dict]:
    return records_of(folder / "metrics" / name, kind)


@pytest.mark.parametrize(("share", "ends"), [(sys.maxsize, [12, 23, 41, 77, 149]), (0, [12])])
def test_places_are_outside_of_the_rate(tmp_path, recorder, monkeypatch, share, ends) -> None:
    """And within a share of the time."""
    monkeypatch.setattr(why, "MAX_SHARE", share)
    train(tmp_path, 200, JOBKIT_WHY="4")
    found = written(tmp_path, "0.w0.jsonl", "why")
    # After the warm-up of 2 and 5 more, each twice as late; one step before them settles.
    assert [(r["step"], r["steps"]) for r in found] == [(end, 4) for end in ends]
    counted = sum(w["steps"] for w in written(tmp_path, "0.jsonl", "window"))
    assert counted == 200 - 5 * 6  # profiled or not: one before, one after
    assert (tmp_path / "traces" / "why.rank0.json.gz").exists()


def test_where_nothing_is_profiled_it_is_said(tmp_path, recorder: Recorder, monkeypatch) -> None:
    for env, steps, says in (
        ({"JOBKIT_WHY": "0"}, 40, []),
        ({"LOCAL_RANK": "8"}, 40, []),  # eight of a node are profiled
        ({}, 6, ["the program ended after 6 steps; step 13 ends the first profile"]),
        ({"RANK": "0"}, 40, ["the program does not use torch"]),
    ):
        folder = tmp_path / str(env)
        if "RANK" in env:
            monkeypatch.delitem(sys.modules, "torch")
        train(folder, steps, **env)
        assert [r.get("reason") for r in written(folder, "0.w0.jsonl", "why")] == says
        assert "start" not in recorder.calls


def test_a_pause_ends_a_place_and_its_steps_count(tmp_path: Path, recorder: Recorder) -> None:
    meter = started(tmp_path)
    for step in range(20):
        if step == 11:
            meter.pause()
            assert not recorder.running
            meter.resume()
        meter.step(8)
    (record,) = written(tmp_path, "0.w0.jsonl", "why")
    assert record["steps"] == 3


def test_another_profiler_of_the_program_has_its_turn(tmp_path: Path, recorder: Recorder) -> None:
    meter = started(tmp_path)
    for _ in range(10):
        meter.step(8)
    assert recorder.running
    sys.modules["torch"].autograd.profiler.profile()._prepare_trace()
    assert not recorder.running


def test_errors_are_one_line_each_and_end_no_training(tmp_path, recorder, monkeypatch, capfd):
    """100 programs, with one error each in a random call."""
    monkeypatch.setattr(why, "MAX_SHARE", sys.maxsize)  # so that a third call may fail
    chance, told = random.Random(0), 0
    places = ["start", "stop", "events", "record_function"]
    own = ["measured", "union", "minus", "resident_mib", "host_name", "_save"]
    for number in range(100):
        name, folder = chance.choice([*places, "save", *own]), tmp_path / str(number)
        recorder.fails = {} if name in own else {name: chance.randint(1, 3)}
        recorder.calls.clear()
        with monkeypatch.context() as patch:
            if name in own:
                error = chance.choice([RuntimeError, KeyError, OSError, MemoryError])
                patch.setattr(why, name, Mock(side_effect=error(name)))
            train(folder, 100)
        assert written(folder, "0.jsonl", "window")[-1]["step"] == 100, name
        assert written(folder, "0.jsonl", "run_end")
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) <= 1 and all("the causes are not measured" in line for line in lines)
        assert name not in places or lines, name
        told += len(lines)
    assert told > 80
