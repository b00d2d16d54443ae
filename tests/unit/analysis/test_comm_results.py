"""The communication benchmark's results: bandwidths, fitted lines, files and options."""

import random
import subprocess
from pathlib import Path

import pytest

from jobkit.checks import comm as door
from jobkit.errors import UsageError, read_bytes
from jobkit.metric import comm
from jobkit.metric.kinds import KINDS
from jobkit.units import say_bytes, say_seconds
from support.place import ROOT
from support.refusals import refusal
from support.stub_srun import Fake

SIZES = [2**k for k in range(10, 27, 2)]


def made(operation: str = "all_reduce", scope: str = "all", noise: float = 0.0, rate: float = 10.0):
    """Samples on a line of 20 us and so many GB/s, with a relative noise."""
    draw = random.Random(0)
    times = [(20e-6 + size / rate / 1e9) * (1 + noise * draw.uniform(-1, 1)) for size in SIZES]
    return [
        comm.sample(operation, scope, 4, 1, size, [t, 0.9 * t, 1.1 * t], True)
        for size, t in zip(SIZES, times, strict=True)
    ]


FACTORS = {"all_reduce": 1.5, "broadcast": 1.0, "sendrecv": 1.0}
FACTORS |= dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 0.75)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    for operation, factor in FACTORS.items():
        one = comm.sample(operation, "all", 4, 2, 2 * 10**9, [4.0, 1.0, 2.0], True)
        assert (one.time_s, one.time_low_s, one.time_high_s) == (2.0, 1.0, 4.0)
        assert (one.algorithm_gb_per_s, one.bus_gb_per_s) == pytest.approx((1.0, factor))


def test_a_line_finds_latency_and_bandwidth() -> None:
    for noise, within in ((0.0, 1e-6), (0.05, 0.05)):
        found = comm.fit_line(made(noise=noise))
        assert found.latency_s == pytest.approx(20e-6, rel=within)
        assert found.gb_per_s == pytest.approx(10.0, rel=within)
        assert found.worst_share < max(1e-9, 2 * noise)
    assert found.worst_share > 0


def test_nothing_that_is_fitted_is_below_zero() -> None:
    falling, steep = (
        comm.fit_line([comm.sample("broadcast", "all", 2, 1, s, [t], True) for s, t in times])
        for times in (((1024, 2.0), (4096, 1.0)), ((1024, 1.0), (4096, 10.0)))
    )
    assert (falling.s_per_byte, falling.gb_per_s, steep.latency_s) == (0, float("inf"), 0)
    assert falling.is_bad and not comm.fit_line(made()).is_bad, "no link is without end"
    assert 1.0 < falling.latency_s < 2.0 and 1 / 1024 < steep.s_per_byte < 10 / 4096


def test_lines_are_of_right_results_at_two_sizes_or_more() -> None:
    alone = made("broadcast")[:1]
    wrong = [comm.sample("all_to_all", "all", 4, 1, s, [1.0], False) for s in SIZES]
    found = comm.fit_lines([*made("sendrecv", "intra_node"), *alone, *wrong])
    assert [(one.operation, one.scope) for one in found] == [("sendrecv", "intra_node")]


def test_files_are_read_as_they_were_written_and_others_refused(tmp_path: Path) -> None:
    samples = [*made(noise=0.3), comm.sample("broadcast", "all", 2, 1, 8, [1 / 3], False)]
    table = tmp_path / "comm.csv"
    table.write_text(comm.to_csv(samples))
    assert table.read_text().splitlines()[0] == ",".join(KINDS["comm"])
    assert comm.read_csv(table) == samples
    refused = dict.fromkeys(("a,b\n1,2\n", "operation\nall_reduce\n"), r"is no comm\.csv")
    for time in ("0.0", "nan", "inf"):
        wrong = comm.to_csv(samples).replace(repr(samples[-1].time_s), time)
        refused[wrong] = "has a time that is none"
    for text, why in refused.items():
        table.write_text(text)
        with pytest.raises(UsageError, match=why):
            comm.read_csv(table)
    with pytest.raises(UsageError, match="cannot read"):
        comm.read_csv(tmp_path / "absent")


def test_sizes_are_read_and_said() -> None:
    for text, size in (("12", 12), ("4K", 4096), ("16MiB", 2**24), ("1g", 2**30), ("8 kib", 8192)):
        assert read_bytes(text) == size
    for size, text in ((12, "12 B"), (4096, "4 KiB"), (2**24, "16 MiB"), (3 * 2**29, "1.5 GiB")):
        assert say_bytes(size) == text
    for seconds, text in ((2.5, "2.5 s"), (0.25, "250 ms"), (0.001, "1 ms"), (7.25e-6, "7.25 us")):
        assert say_seconds(seconds) == text


def test_bad_options_are_one_line(capsys) -> None:
    for words, text in (
        (["--ops", "all_reduc"], "invalid choice: 'all_reduc' (choose from"),
        (["--min-bytes", "2K", "--max-bytes", "1K"], "--max-bytes 1024 is less than --min-bytes"),
        (["--check=1"], "needs at least 2 ranks: say --nproc-per-node 2"),
        (["--max-bytes=1.5M"], "'1.5M': must be a size"),
    ):
        assert text in refusal(door.main, ["--check=2", *words], capsys)


def test_run_sh_starts_it_in_a_folder_of_its_own(tmp_path: Path) -> None:
    run = Fake(tmp_path)
    environ = run.environ(JOBKIT_LOGS=str(run.folder / "logs"))
    line = ["bash", str(ROOT / "run.sh"), "--comm", "--ops", "all_reduce"]
    done = subprocess.run(line, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    call = run.calls()[-1]
    assert int(call[call.index("--nproc-per-node") + 1]) >= 2
    words = call[call.index("jobkit.checks.comm") + 1 :]
    assert words[:2] == ["--ops", "all_reduce"]
    folder = Path(words[words.index("--run-dir") + 1])
    assert folder.parent == run.folder / "logs" / "comm" and folder.is_dir()
