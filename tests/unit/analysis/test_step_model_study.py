"""The step model of a study: what each strategy moves, the command, the section of the report."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from test_step_model import BATCH, FAST, LINKS, line

from jobkit.analysis import cli
from jobkit.analysis.collect.results import collect
from jobkit.analysis.findings.step_cli import main
from jobkit.analysis.findings.step_fit import StepModel
from jobkit.analysis.findings.step_links import Link, Message, communication_s
from jobkit.analysis.findings.step_model import messages, step_lines, step_models, step_table
from jobkit.errors import UsageError
from jobkit.metric import comm
from jobkit.paths import write_json
from support import fake_study
from support.fake_study import logs, whole_study

DDP = {
    "strategy": "ddp",
    "parameters": 10 * 2**20,
    "ddp_comm_hook": "none",
    "ddp_bucket_mib": 25.0,
    "zero1": False,
}
FSDP = {
    "strategy": "fsdp",
    "parameters": 1000,
    "precision": "fp32",
    "accumulate": 1,
    "fsdp_reshard_after_forward": True,
    "fsdp_reduce_fp32": True,
    "fsdp_hybrid_replicas": 1,
}
MIB = 2**20


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (DDP, [Message("all_reduce", 20 * MIB, 2)]),
        (DDP | {"ddp_comm_hook": "bf16"}, [Message("all_reduce", 10 * MIB, 2)]),
        (
            DDP | {"parameters": 8, "zero1": True},
            [Message("all_reduce", 32), Message("all_gather", 32)],
        ),
        (FSDP, [Message("all_gather", 4000, 2), Message("reduce_scatter", 4000)]),
        (
            FSDP | {"precision": "bf16", "accumulate": 3},
            [Message("all_gather", 2000, 6), Message("reduce_scatter", 4000)],
        ),
        (
            FSDP
            | {"precision": "fp16", "fsdp_reduce_fp32": False, "fsdp_reshard_after_forward": False},
            [Message("all_gather", 2000, 1), Message("reduce_scatter", 2000)],
        ),
        ({"strategy": "single", "parameters": 8}, []),
    ],
)
def test_what_a_step_moves(run, expected: list[Message]) -> None:
    assert messages(run) == expected


@pytest.mark.parametrize(
    "run",
    [
        {"strategy": "pp", "parameters": 8},
        DDP | {"ddp_comm_hook": "powersgd"},
        FSDP | {"fsdp_hybrid_replicas": 2},
    ],
)
def test_what_is_not_known_is_refused(run) -> None:
    with pytest.raises(UsageError, match="the model knows"):
        messages(run)


# --- studies ---------------------------------------------------------------------------------


def modelled(spec) -> float:
    """The rate of a run whose steps follow a truth over LINKS."""
    n = spec.world_size
    sent = communication_s([Message("all_reduce", 620362 * 4)], n, 1, LINKS)
    truth = StepModel(0.0, 50e-6, 0.1)
    return BATCH / truth.step_s(BATCH / n, sent) * (1 + 1e-4 * spec.repeat)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_study, "rate", modelled)
    whole_study("s", strategies=("ddp",), gpus=(1, 2, 4, 8), repeats=3)


def test_a_study_is_foretold(study: None) -> None:
    (one,) = step_models(collect("s", write=False), LINKS)
    assert one.model is not None and one.refused == ""
    assert one.model.per_sample_s == pytest.approx(50e-6, rel=1e-2)
    assert one.model.overlap_share == pytest.approx(0.1, abs=0.02)
    assert [t.ranks for t in one.tests] == [4, 8, 8]
    assert all(abs(t.error_share) < 0.01 for t in one.tests)
    lines = step_lines([one])
    assert [text.split(":")[0] for text in lines] == [
        "step model",
        *["on paper"] * 4,
        *["held out"] * 3,
    ]
    assert "1 rank: computation 25.6 ms, communication 0 ms, of which 0 ms show" in lines[1]
    assert "held out: ddp: fitted to 1, 2 ranks, 4 foretold " in lines[5]
    assert [row[:3] for row in step_table([one]).rows] == [
        ["ddp", "1, 2", "4"],
        ["ddp", "1, 2", "8"],
        ["ddp", "1, 2, 4", "8"],
    ]


def test_runs_that_are_not_one_curve_are_refused(study: None) -> None:
    results = collect("s", write=False)
    results.runs.loc[0, "torch_version"] = "1.0"
    (one,) = step_models(results, LINKS)
    assert one.model is None and one.refused.startswith("not compared: torch_version differs")
    assert step_table([one]).notes == [f"No step model of ddp: {one.refused}."]


def test_the_command(study: None, capsys, tmp_path: Path) -> None:
    assert main(["s", "--intra", "1", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 8 and said[0].startswith("step model: ddp: ")
    path = tmp_path / "comm.json"
    write_json(path, comm.to_json({}, [line("all_reduce", "all", 2, 1, FAST)]))
    assert main(["s", "--comm", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == said


def test_the_command_takes_a_collective_as_it_was_measured(capsys, tmp_path: Path) -> None:
    whole_study(strategies=("fsdp",), gpus=(1, 2, 4))
    path, slow = tmp_path / "comm.json", Link(1e-3, 1e-8)
    both = [line("all_reduce", "all", 2, 1, FAST), line("reduce_scatter", "all", 2, 1, slow)]
    said = []
    for lines in (both[:1], both):
        write_json(path, comm.to_json({}, lines))
        for words in ([], ["--intra", "1", "1"]):
            assert main(["s", "--comm", str(path), *words]) == 0
            said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[3]  # what is said counts instead of what was measured
    assert said[2] != said[0]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "say --comm FILE"),
        (["--intra", "-1", "5"], "--intra -1 5: microseconds"),
        (["--inter", "1", "0"], "--inter 1 0: microseconds"),
        (["--intra", "1", "nan"], "microseconds"),
        (["--inter", "1", "1"], "no step model: ddp: the link inside a node is not known"),
        (["--comm", "absent.json"], "no file absent.json"),
    ],
)
def test_what_cannot_be_used_is_one_line(study: None, capsys, words, text: str) -> None:
    assert main(["s", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and text in said.err


def test_two_sizes_are_too_few(capsys) -> None:
    whole_study("two", strategies=("ddp",), gpus=(1, 2))
    assert main(["two", "--intra", "1", "1"]) == 2
    assert "3 sizes are needed" in capsys.readouterr().err


def test_the_report_has_the_held_out_sizes(study, tmp_path: Path, monkeypatch, capsys) -> None:
    # The figures take seconds, and are not what this is about.
    drawn = SimpleNamespace(paths=(), skipped=())
    monkeypatch.setattr("jobkit.analysis.figures.draw", lambda *_: drawn)
    path = tmp_path / "comm.json"
    write_json(path, comm.to_json({}, [line("all_reduce", "all", 2, 1, FAST)]))
    assert cli.plot_main(["s", "--step-model", str(path)]) == 0
    assert "held out: ddp: fitted to 1, 2, 4 ranks, 8 foretold " in capsys.readouterr().out
    html = (logs() / "s" / "report.html").read_text()
    assert "<h2>Step-time model, validated on held-out sizes</h2>" in html
    assert html.count("<td>1, 2</td>") == 2
    assert cli.plot_main(["s"]) == 0
    assert "Steps on paper" not in (logs() / "s" / "report.html").read_text()
    assert cli.plot_main(["s", "--step-model", str(tmp_path / "no.json")]) == 2
