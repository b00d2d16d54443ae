"""collect --logs: logs that exist already, each a run, and what is wrong with the request."""

from pathlib import Path

import pytest

from jobkit.analysis.cli import collect_main
from jobkit.analysis.collect.results import collect
from jobkit.analysis.log_options import try_pattern
from jobkit.errors import Exit

LINE = "iter {n}: loss 3.0, time {ms}ms, mfu 30.00%\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with four logs of nanoGPT: two of one rank, one of two, one that crashed."""
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, ranks, ms in (("a", 1, 100.0), ("b", 1, 102.0), ("c", 2, 55.0), ("d", 4, 30.0)):
        lines = "".join(LINE.format(n=n, ms=900.0 if n == 0 else ms) for n in range(0, 60, 10))
        (tmp_path / f"slurm-{name}.out").write_text(f"ranks={ranks}\n{lines}")
    with (tmp_path / "slurm-d.out").open("a") as log:
        log.write('Traceback (most recent call last):\n  File "t.py"\nValueError: no\n')
    return tmp_path


ARGUMENTS = ["--logs", "slurm-*.out", "--pattern", "nanogpt", "--size", r"ranks=(\d+)"]


def test_each_log_is_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_main([*ARGUMENTS, "--name", "old"]) == Exit.INCOMPLETE  # one crashed
    results = collect("old")  # again, by its name alone
    runs = results.runs.set_index("run_id")
    assert list(runs["status"]) == ["ok", "ok", "ok", "failed"]
    assert "ValueError" in runs.loc["slurm-d.out", "reason"]
    assert list(runs["world_size"]) == [1, 1, 2, 4]
    assert list(runs["repeat"]) == [0, 1, 0, 0]
    assert runs.loc["slurm-c.out", "throughput"] == pytest.approx(1 / 0.055)
    assert runs.loc["slurm-c.out", "throughput_unit"] == "steps/s"
    size = next(s for s in results.sizes if s.world_size == 2)
    assert size.speed_up == pytest.approx((1 / 0.055) / ((1 / 0.1 + 1 / 0.102) / 2))
    assert len(results.steps) == 24
    assert "whether it ended well is not known" in runs.loc["slurm-a.out", "reason"]
    assert (folder / "logs" / "old" / "steps.csv").exists()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (["--logs", "no-*.out"], "no such file"),
        (["--size", "ranks"], "has no group"),
        (["--size", "ranks=("], "does not compile"),
        (["--size", "(?P<gpus>[0-9]+)"], "must be one of"),
        (["--pattern", "nanogtp"], "did you mean 'nanogpt'"),
        (["--work-per-step", "0"], "number over 0"),
        (["--name", "../up"], "study name"),
    ],
)
def test_a_bad_request_is_one_line(
    folder: Path, changed: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = collect_main([*ARGUMENTS, *changed])
    except SystemExit as stop:
        code = int(str(stop.code))
    error = capsys.readouterr().err
    assert code == Exit.USAGE
    assert says in error and error.count("\n") == 1
    assert not (folder / "logs").exists()


def test_logs_need_a_size_and_no_study(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_main(["--logs", "slurm-*.out"]) == Exit.USAGE
    assert "--size" in capsys.readouterr().err
    assert collect_main(["demo", *ARGUMENTS]) == Exit.USAGE
    assert "not both" in capsys.readouterr().err


def test_a_log_without_a_size_or_a_line_is_told_and_not_dropped(folder: Path) -> None:
    (folder / "slurm-e.out").write_text(LINE.format(n=10, ms=5))
    (folder / "slurm-f.out").write_text("ranks=8\nnothing\n")
    assert collect_main(ARGUMENTS) == Exit.INCOMPLETE
    runs = collect("from-logs").runs.set_index("run_id")
    assert "no size" in runs.loc["slurm-e.out", "reason"]
    assert "no line of pattern nanogpt" in runs.loc["slurm-f.out", "reason"]


def test_a_list_that_somebody_else_wrote_opens_no_file_elsewhere(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect_main(ARGUMENTS) == Exit.INCOMPLETE
    file = folder / "logs" / "from-logs" / "logs.json"
    file.write_text(file.read_text().replace("slurm-a.out", "secret"))
    assert collect_main(["from-logs"]) == Exit.USAGE
    assert "was not written by you here" in capsys.readouterr().err


def test_nodes_times_ranks_of_a_node(folder: Path) -> None:
    collect_main([*ARGUMENTS, "--gpus-per-node", "4"])
    runs = collect("from-logs").runs.set_index("run_id")
    assert list(runs["world_size"]) == [4, 4, 8, 16]
    assert list(runs["nodes"]) == [1, 1, 2, 4]


def test_try_pattern_shows_lines_and_the_rate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert try_pattern(["slurm-a.out", "--pattern", "nanogpt", "--most", "2"]) == Exit.OK
    shown = capsys.readouterr().out
    assert "line 2: step=0" in shown and "and 4 more" in shown
    assert "throughput = 10" in shown and "throughput_unit = steps/s" in shown
    assert try_pattern(["slurm-a.out", "--line", "(?P<step_time_s>NO)"]) == Exit.INCOMPLETE
    assert try_pattern(["none.out", "--pattern", "nanogpt"]) == Exit.USAGE
    assert "No such file" in capsys.readouterr().err
