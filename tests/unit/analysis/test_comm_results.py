"""The communication benchmark's results: bandwidths, fitted lines, files, figures, doors."""

import random
from pathlib import Path

import pytest
from test_run_sh import Fake

from jobkit.analysis.figures import comm as figures
from jobkit.checks.comm import cli as door
from jobkit.checks.comm.request import Request
from jobkit.errors import UsageError, read_bytes
from jobkit.metric import comm
from jobkit.metric.line import KINDS
from jobkit.paths import write_json

SIZES = [2**k for k in range(10, 27, 2)]


def made(operation: str = "all_reduce", scope: str = "all", noise: float = 0.0, **truth: float):
    """Samples on a line, with a relative noise."""
    latency, rate = truth.get("latency_s", 20e-6), truth.get("gb_per_s", 10.0) * 1e9
    draw = random.Random(0)
    times = [(latency + size / rate) * (1 + noise * draw.uniform(-1, 1)) for size in SIZES]
    return [
        comm.sample(operation, scope, 4, 1, size, [t, 0.9 * t, 1.1 * t], True)
        for size, t in zip(SIZES, times, strict=True)
    ]


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("sendrecv", 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(operation: str, factor: float) -> None:
    one = comm.sample(operation, "all", 4, 2, 2 * 10**9, [4.0, 1.0, 2.0], True)
    assert (one.time_s, one.time_low_s, one.time_high_s) == (2.0, 1.0, 4.0)
    assert one.algorithm_gb_per_s == pytest.approx(1.0)
    assert one.bus_gb_per_s == pytest.approx(factor)


def test_a_line_finds_latency_and_bandwidth() -> None:
    exact = comm.fit_line(made())
    assert exact.latency_s == pytest.approx(20e-6)
    assert exact.gb_per_s == pytest.approx(10.0)
    assert exact.worst_share < 1e-9
    noisy = comm.fit_line(made(noise=0.05))
    assert noisy.latency_s == pytest.approx(20e-6, rel=0.05)
    assert noisy.gb_per_s == pytest.approx(10.0, rel=0.05)
    assert 0 < noisy.worst_share < 0.1


def test_nothing_that_is_fitted_is_below_zero() -> None:
    def line(*times: float) -> comm.Line:
        points = [
            comm.sample("broadcast", "all", 2, 1, size, [t], True)
            for size, t in zip((1024, 4096), times, strict=True)
        ]
        return comm.fit_line(points)

    falling, steep = line(2.0, 1.0), line(1.0, 10.0)
    assert falling.s_per_byte == 0 and 1.0 < falling.latency_s < 2.0
    assert falling.gb_per_s == float("inf")
    assert steep.latency_s == 0 and 1 / 1024 < steep.s_per_byte < 10 / 4096


def test_lines_are_of_right_results_at_two_sizes_or_more() -> None:
    alone = made("broadcast")[:1]
    wrong = [comm.sample("all_to_all", "all", 4, 1, s, [1.0], False) for s in SIZES]
    found = comm.fit_lines([*made("sendrecv", "intra_node"), *alone, *wrong])
    assert [(one.operation, one.scope) for one in found] == [("sendrecv", "intra_node")]
    with pytest.raises(ValueError, match="two sizes"):
        comm.fit_line(alone)


def test_the_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    samples = [*made(noise=0.3), comm.sample("broadcast", "all", 2, 1, 8, [1 / 3], False)]
    path = tmp_path / "comm.csv"
    path.write_text(comm.to_csv(samples))
    assert path.read_text().splitlines()[0] == ",".join(KINDS["comm"])
    assert comm.read_csv(path) == samples
    write_json(tmp_path / "comm.json", comm.to_json({"backend": "gloo"}, comm.fit_lines(samples)))
    assert comm.read_lines(tmp_path / "comm.json") == comm.fit_lines(samples)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "operation\nall_reduce\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"is no comm\.json"):
        comm.read_lines(path)
    if text:
        with pytest.raises(UsageError, match=r"is no comm\.csv"):
            comm.read_csv(path)
    with pytest.raises(UsageError, match="no file"):
        comm.read_lines(tmp_path / "absent")


@pytest.mark.parametrize("latency", ["-1", '"x"', "null", "true"])
def test_a_line_that_is_no_line_is_refused(tmp_path: Path, latency: str) -> None:
    path = tmp_path / "comm.json"
    write_json(path, comm.to_json({}, [comm.fit_line(made())]))
    found = comm.read_lines(path)[0].latency_s
    path.write_text(path.read_text().replace(f'"latency_s": {found!r}', f'"latency_s": {latency}'))
    with pytest.raises(UsageError, match="with fitted lines"):
        comm.read_lines(path)


# --- what is asked for -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"), [("12", 12), ("4K", 4096), ("16MiB", 2**24), ("1g", 2**30), ("8 kib", 8192)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert read_bytes(text) == size


def test_sizes_are_said() -> None:
    assert [comm.say_bytes(s) for s in (12, 4096, 2**24, 3 * 2**29)] == [
        "12 B",
        "4 KiB",
        "16 MiB",
        "1.5 GiB",
    ]
    assert [comm.say_seconds(s) for s in (2.5, 0.25, 0.001, 7.25e-6)] == [
        "2.5 s",
        "250 ms",
        "1 ms",
        "7.25 us",
    ]


def test_sizes_go_up_by_the_factor() -> None:
    assert Request(factor=10, min_bytes=100).sizes(99_999) == [100, 1000, 10_000]
    assert Request().sizes(5) == [1024]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ops", "all_reduc"], "did you mean 'all_reduce'"),
        (["--factor", "1"], "--factor 1: must be from 2"),
        (["--iterations", "0"], "--iterations 0: must be from 1"),
        (["--seconds-per-size", "nan"], "--seconds-per-size nan: must be"),
        (["--min-bytes", "2K", "--max-bytes", "1K"], "--max-bytes 1024 is less than --min-bytes"),
        (["--max-bytes", "0"], "--max-bytes 0: must be from 4"),
        (["--check=1"], "needs at least 2 ranks: say --nproc-per-node 2"),
    ],
)
def test_bad_options_are_one_line(words: list[str], text: str, capsys) -> None:
    assert door.main(["--check=2", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and text in said.err


@pytest.mark.parametrize("size", ["big", "1T", "-4", "K", "1.5M", ""])
def test_a_size_that_is_none_is_refused(size: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        door.main([f"--max-bytes={size}"])
    assert stop.value.code == 2
    assert f"'{size}': must be a size" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_run_sh_starts_it_in_a_folder_of_its_own(run: Fake) -> None:
    done = run("--comm", "--ops", "all_reduce", JOBKIT_LOGS=str(run.folder / "logs"))
    assert done.returncode == 0, done.stderr
    check, call = run.calls()[-2:]
    assert check[1] == "jobkit.checks.comm.cli" and check[-1].startswith("--check=")
    assert int(call[call.index("--ranks") + 1]) >= 2
    words = call[call.index("jobkit.checks.comm.cli") + 1 :]
    assert words[:2] == ["--ops", "all_reduce"]
    folder = Path(words[words.index("--run-dir") + 1])
    assert folder.parent == run.folder / "logs" / "comm" and folder.is_dir()


def test_comm_and_preflight_exclude_each_other(run: Fake) -> None:
    done = run("--comm", "--preflight")
    assert done.returncode == 2 and "one after the other" in done.stderr
    assert not run.calls()


# --- the figure ------------------------------------------------------------------------------


def test_a_line_for_each_operation_in_both_panels(tmp_path: Path) -> None:
    samples = [*made("all_reduce"), *made("sendrecv", "inter_node", gb_per_s=1.0)]
    drawn = figures.comm_figure(samples, {"backend": "gloo", "device": "A Processor"})
    bandwidth, time = drawn.axes
    assert [list(one.get_xdata()) for one in bandwidth.lines] == [SIZES, SIZES]
    assert list(bandwidth.lines[0].get_ydata()) == [s.bus_gb_per_s for s in made()]
    assert len(time.lines) == 4  # and the fitted ones
    assert list(time.lines[1].get_ydata()) == pytest.approx([s.time_s for s in made()])
    assert bandwidth.get_xscale() == bandwidth.get_yscale() == time.get_yscale() == "log"
    assert "busbw (GB/s)" in bandwidth.get_ylabel()
    assert bandwidth.get_title(loc="left") == "4 ranks on 1 node | gloo | A Processor"
    (legend,) = drawn.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[:2] == ["all_reduce", "sendrecv, inter-node"]


def test_the_newest_is_drawn(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path))
    assert figures.main([]) == 2
    assert "run python -m jobkit comm first" in capsys.readouterr().err
    folder = tmp_path / "comm" / "job-7"
    folder.mkdir(parents=True)
    (folder / "comm.csv").write_text(comm.to_csv(made()))
    assert figures.main([]) == 0
    assert (folder / "comm.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "comm.svg").exists()
    (folder / "comm.csv").write_text(comm.to_csv([]))
    assert figures.main([str(folder)]) == 2
    assert "has no row" in capsys.readouterr().err
