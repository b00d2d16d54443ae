"""On a GPU a step's time on the host is that of its issue: events on the stream say its own."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobkit.program import machine, windows


class FakeDevice:
    """Stands for torch.cuda, with a clock that goes on only where a test says so."""

    def __init__(self) -> None:
        self.now_s, self.capturing, self.broken, self.waits = 0.0, False, False, 0
        self.is_initialized, self.is_current_stream_capturing = lambda: True, lambda: self.capturing
        self.get_device_name, self.device_count = lambda: "Fake", lambda: 0

    def synchronize(self) -> None:
        self.waits += 1

    def Event(self, enable_timing: bool) -> "FakeEvent":
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    """Stands for torch.cuda.Event."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def record(self) -> None:
        self.at_s = self._device.now_s

    def elapsed_time(self, end: "FakeEvent") -> float:
        """In milliseconds."""
        if self._device.broken:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1e3 * (end.at_s - self.at_s)


def use(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=cuda, __version__="0", get_num_threads=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    use(fake, monkeypatch)
    return fake


@pytest.fixture
def meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> windows.Meter:
    monkeypatch.setattr(windows, "watch", lambda *_: None)  # the machine is not sampled
    monkeypatch.setattr(windows, "FIRST_STEPS", 50)  # all after the warm-up are one window
    env = {"JOBKIT_RUN_DIR": str(tmp_path), "JOBKIT_WHY": "0", "WORLD_SIZE": "1"}
    made = windows.Meter("images", "meter", env | {"JOBKIT_WARMUP_STEPS": "2"})
    made.begin(0.0)
    return made


def steps(meter: windows.Meter, device: FakeDevice, *seconds: float) -> None:
    for each in seconds:
        device.now_s += each
        meter.step(8)


def window(tmp_path: Path) -> dict[str, object]:
    """The last window that was written."""
    lines = (tmp_path / "metrics" / "0.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "window"][-1]


def test_the_median_of_the_steps_is_that_of_the_gpu(
    tmp_path: Path, meter, device: FakeDevice
) -> None:
    steps(meter, device, 9.0, 9.0, *[2.0] * 18, 5.0, 3.0)
    waits = device.waits
    meter.close()
    found = window(tmp_path)
    assert found["steps"] == 20 and not found["warmup"]
    assert found["step_p50_s"] == pytest.approx(2.0)
    assert device.waits == waits + 1, "only the end of a window waits for the GPU"


def test_a_pause_and_a_graph_capture_are_no_steps(tmp_path: Path, meter, device) -> None:
    steps(meter, device, 1.0, 1.0, 2.0)
    meter.pause()
    device.now_s += 100.0
    meter.resume()
    steps(meter, device, 1.0, 2.0)
    device.capturing = True
    steps(meter, device, 50.0)
    device.capturing = False
    steps(meter, device, 50.0, 2.0)
    meter.close()
    found = window(tmp_path)
    assert (found["steps"], found["step_p50_s"]) == (6, 2.0)


def test_events_that_cannot_be_read_end_nothing(tmp_path: Path, meter, device) -> None:
    device.broken = True
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


def test_a_gpu_that_the_program_does_not_use_is_not_asked(
    tmp_path: Path, monkeypatch, meter
) -> None:
    """Any other call could initialise CUDA before the program does. The times are the host's."""
    cuda = SimpleNamespace(is_initialized=lambda: False)
    use(cuda, monkeypatch)
    for _ in range(4):
        meter.step(8)
    meter.pause(), meter.resume()
    assert meter.on and machine.gpus_in_use() == []
    meter.end("ok", "")
    assert "step_p50_s" in window(tmp_path)
