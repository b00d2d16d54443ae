"""On a GPU a step's time on the host is that of its issue: events on the stream say its own."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from jobkit.program import machine, windows
from support.records import records_of


class FakeEvent:
    """Stands for torch.cuda.Event, with a clock that goes on only where a test says so."""

    now_s, broken = 0.0, False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = self.now_s

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "FakeEvent") -> float:
        """In milliseconds."""
        if self.broken:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for torch.cuda."""
    cuda = Mock(Event=type("Event", (FakeEvent,), {}))
    cuda.is_current_stream_capturing.return_value = False
    cuda.get_device_name.return_value = "Fake"
    torch = SimpleNamespace(cuda=cuda, __version__="0", get_num_threads=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return cuda


@pytest.fixture
def meter(tmp_path: Path, device: Mock, monkeypatch: pytest.MonkeyPatch) -> windows.Meter:
    monkeypatch.setattr(windows, "watch", lambda *_: None)  # the machine is not sampled
    monkeypatch.setattr(windows, "FIRST_STEPS", 50)  # all after the warm-up are one window
    env = {"JOBKIT_RUN_DIR": str(tmp_path), "JOBKIT_WHY": "0", "WORLD_SIZE": "1"}
    made = windows.Meter("images", "meter", env | {"JOBKIT_WARMUP_STEPS": "2"})
    made.begin(0.0)
    return made


def steps(meter: windows.Meter, device: Mock, *seconds: float) -> None:
    for each in seconds:
        device.Event.now_s += each
        meter.step(8)


def window(tmp_path: Path) -> dict:
    return records_of(tmp_path / "metrics" / "0.jsonl", "window")[-1]


def test_the_median_of_the_steps_is_that_of_the_gpu(tmp_path: Path, meter, device) -> None:
    steps(meter, device, 9.0, 9.0, *[2.0] * 18, 5.0, 3.0)
    waits = device.synchronize.call_count
    meter.close()
    found = window(tmp_path)
    assert found["steps"] == 20 and not found["warmup"]
    assert found["step_p50_s"] == pytest.approx(2.0)
    assert device.synchronize.call_count == waits + 1, "only the end of a window waits for the GPU"


def test_the_last_window_ends_with_the_gpu_s_work(tmp_path: Path, meter, device) -> None:
    steps(meter, device, 9.0, 9.0, *[2.0] * 4)
    meter.exited()
    assert 8.0 <= window(tmp_path)["wall_s"] < 9.0


def test_a_pause_and_a_graph_capture_are_no_steps(tmp_path: Path, meter, device) -> None:
    steps(meter, device, 1.0, 1.0, 2.0)
    meter.pause()
    device.Event.now_s += 100.0
    meter.resume()
    steps(meter, device, 1.0, 2.0)
    device.is_current_stream_capturing.return_value = True
    steps(meter, device, 50.0)
    device.is_current_stream_capturing.return_value = False
    steps(meter, device, 50.0, 2.0)
    meter.close()
    found = window(tmp_path)
    assert (found["steps"], found["step_p50_s"]) == (6, 2.0)


def test_events_that_cannot_be_read_end_nothing(tmp_path: Path, meter, device) -> None:
    device.Event.broken = True
    steps(meter, device, *[1.0] * 4)
    meter.close()
    assert meter.on and window(tmp_path)["steps"] == 2 and "step_p50_s" not in window(tmp_path)


def test_events_of_a_stream_that_does_nothing_are_no_times(tmp_path: Path, meter, device) -> None:
    """Nor where the window has a pause, which is in none of its times."""
    steps(meter, device, *[0.0] * 4)
    meter.pause()
    time.sleep(0.02)
    meter.resume()
    meter.close()
    assert window(tmp_path)["paused_s"] >= 0.02 and "step_p50_s" not in window(tmp_path)


def test_a_gpu_that_the_program_does_not_use_is_not_asked(tmp_path: Path, meter, device) -> None:
    """Any other call could initialise CUDA before the program does. The times are the host's."""
    device.is_initialized.return_value = False
    steps(meter, device, *[1.0] * 4)
    meter.pause(), meter.resume()
    assert meter.on and machine.gpus_in_use() == []
    meter.end("ok", "")
    assert "step_p50_s" in window(tmp_path)
    assert {call[0] for call in device.mock_calls} == {"is_initialized"}
