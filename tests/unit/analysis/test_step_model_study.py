"""The step model of a study: what each strategy sends, the command, the section of the report."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_step_model import BATCH, FAST, LINKS, line

from jobkit.analysis import cli
from jobkit.analysis.collect.results import collect
from jobkit.analysis.figures.scaling import forecast_figure
from jobkit.analysis.findings.forecast import STEP, forecast_lines, forecast_table, forecasts
from jobkit.analysis.findings.step_cli import main
from jobkit.analysis.findings.step_fit import HeldOut, Point, StepModel
from jobkit.analysis.findings.step_forecast import decided
from jobkit.analysis.findings.step_model import (
    SeriesSteps,
    messages,
    step_lines,
    step_models,
    step_table,
)
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.tables.text import rounded
from jobkit.errors import UsageError
from jobkit.metric import comm
from jobkit.paths import write_json
from jobkit.spec.runspec import RunSpec
from jobkit.spec.traffic import Link, Links, Message, Scope, seconds
from support import fake_study
from support.fake_study import logs, whole_study

MIB, NAN = 2**20, float("nan")
FOUR = Scope(4)
FSDP = {"strategy": "fsdp", "parameters": 1000}


def messages_of(parameters: int, shard_groups: float = NAN, **settings: Any) -> list[Message]:
    spec = RunSpec(**{"ranks_per_node": 4, **settings})
    recorded = {"parameters": parameters, "shard_groups": shard_groups, "status": "ok"}
    return messages({**spec.to_dict(), **recorded})


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"parameters": 10 * MIB}, [Message("all_reduce", 20 * MIB, FOUR, 2)]),
        (
            {"parameters": 10 * MIB, "ddp_comm_hook": "bf16"},
            [Message("all_reduce", 10 * MIB, FOUR, 2)],
        ),
        (
            {"parameters": 8, "zero1": True},
            [Message("all_reduce", 32, FOUR), Message("all_gather", 32, FOUR)],
        ),
        (FSDP, [Message("all_gather", 4000, FOUR, 2), Message("reduce_scatter", 4000, FOUR)]),
        (
            FSDP | {"shard_groups": 1},
            [Message("all_gather", 4000, FOUR), Message("reduce_scatter", 4000, FOUR)],
        ),
        (
            FSDP | {"shard_groups": 2.0},
            [
                Message("all_gather", 2000, FOUR, 2),
                Message("reduce_scatter", 2000, FOUR),
                Message("all_gather", 2000, FOUR),
                Message("reduce_scatter", 2000, FOUR),
            ],
        ),
        (
            FSDP | {"precision": "bf16", "accumulate": 3},
            [Message("all_gather", 2000, FOUR, 6), Message("reduce_scatter", 4000, FOUR)],
        ),
        (
            FSDP
            | {"precision": "fp16", "fsdp_reduce_fp32": False, "fsdp_reshard_after_forward": False},
            [Message("all_gather", 2000, FOUR), Message("reduce_scatter", 2000, FOUR)],
        ),
        (
            FSDP | {"nodes": 2, "fsdp_hybrid_replicas": 2},
            [
                Message("all_gather", 4000, FOUR, 2),
                Message("reduce_scatter", 4000, FOUR),
                Message("all_reduce", 1000, Scope(2, 2, 4)),
            ],
        ),
        ({"strategy": "single", "parameters": 8, "ranks_per_node": 1}, []),
    ],
)
def test_what_a_step_sends(run, expected: list[Message]) -> None:
    assert messages_of(**run) == expected


@pytest.mark.parametrize("run", [{"strategy": "pp"}, {"ddp_comm_hook": "powersgd"}])
def test_what_is_not_known_is_refused(run) -> None:
    with pytest.raises(UsageError, match="does not follow from the logs"):
        messages_of(8, **run)


def test_a_row_without_settings_is_refused() -> None:
    row = {"strategy": "ddp", "parameters": 8, "nodes": 1, "ranks_per_node": 2}
    with pytest.raises(UsageError, match="the logs do not say every setting"):
        messages(row | {"ddp_bucket_mib": float("nan"), "ddp_comm_hook": "none", "zero1": False})
    with pytest.raises(UsageError, match="does not follow from the logs"):
        messages({"strategy": "theirs", "parameters": 8})


# --- studies ---------------------------------------------------------------------------------


def modelled(spec) -> float:
    """The rate of a run whose steps follow a known model over LINKS."""
    n = spec.world_size
    sent = seconds([Message("all_reduce", 620362 * 4, Scope(n))], LINKS)
    real = StepModel(0.0, 50e-6, 0.1)
    return BATCH / real.step_s(Point(n, BATCH / n, sent, 0.0)) * (1 + 1e-4 * spec.repeat)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_study, "rate", modelled)
    whole_study("s", strategies=("ddp",), gpus=(1, 2, 4, 8), repeats=3)


def test_a_study_is_predicted(study: None) -> None:
    (one,) = step_models(collect("s", write=False), LINKS)
    assert one.model is not None and one.refused == ""
    assert one.model.per_sample_s == pytest.approx(50e-6, rel=1e-2)
    assert one.model.overlap_share == pytest.approx(0.1, abs=0.02)
    assert [t.ranks for t in one.tests] == [4, 8, 8]
    assert all(abs(t.error_share) < 0.01 for t in one.tests)
    lines = step_lines([one])
    assert [text.split(":")[0] for text in lines] == [
        "step model",
        *["model"] * 4,
        *["held out"] * 3,
        "limit",
    ]
    assert lines[-1].startswith("limit: ddp: collectives were not measured on 2, 4, 8 ranks: ")
    assert f"Limit of ddp: {one.limit}." in step_table([one]).notes
    assert "1 rank: computation 25.6 ms, communication 0 ms, of which 0 ms are exposed" in lines[1]
    assert "held out: ddp: fitted to 1, 2 ranks, 4 predicted " in lines[5]
    assert [row[:3] for row in step_table([one]).rows] == [
        ["ddp", "1, 2", "4"],
        ["ddp", "1, 2", "8"],
        ["ddp", "1, 2, 4", "8"],
    ]


def test_sizes_whose_collectives_were_measured_are_not_carried_over(study: None) -> None:
    whole = {("all_reduce", n, 1): Link(1e-3, 1e-9) for n in (2, 8)}
    (one,) = step_models(collect("s", write=False), replace(LINKS, whole=whole))
    assert one.carried == (4,)
    assert step_lines([one])[-1].startswith("limit: ddp: collectives were not measured on 4 ranks")
    every = whole | {("all_reduce", 4, 1): Link(1e-3, 1e-9)}
    (one,) = step_models(collect("s", write=False), replace(LINKS, whole=every))
    assert one.carried == () and "collectives" not in "".join(step_lines([one]))


def test_which_forecast_is_taken_and_why(study: None) -> None:
    results = collect("s", write=False)
    models = step_models(results, LINKS)
    _, (said,) = decided(results, forecasts(results, (16,)), models, LINKS)
    rate = re.match(r"ddp at 16 ranks: step model ([\d,.]+), average of laws ", said)[1]
    truth = modelled(RunSpec(ranks_per_node=16))
    assert float(rate.replace(",", "")) == pytest.approx(truth, rel=0.02)
    assert "; the step model is taken: of the held-out 8 ranks the step model missed the" in said
    crossing = forecasts(results, (16,), per_node=8)
    (one,), (said,) = decided(results, crossing, models, LINKS)
    assert "it has the measured link between nodes, which no measured size crosses" in said
    assert one.caution.endswith("between nodes costs is taken from the measured links")
    (one,), (said,) = decided(results, crossing, models, Links(FAST, None))
    assert "the average of laws is taken" in said and "the link between nodes is not known" in said
    assert one.by_steps == {} and one.caution.endswith("taken from published tables")
    _, (said,) = decided(results, crossing, [], LINKS)
    assert said.endswith("no step model: it was not measured")


def test_every_output_shows_the_forecast_that_is_taken(study: None) -> None:
    results = collect("s", write=False)
    found = forecasts(results, (16,), per_node=8)
    (one,), (why,) = decided(results, found, step_models(results, LINKS), LINKS)
    table = forecast_table(results, [one])
    assert list(table["law"]) == [STEP] and table["speed_up_low"].isna().all()
    rate, shown = one.at(16).rate[0], one.at(16).speed_up[0]
    assert f"step model {rounded(rate)}, average of laws " in why
    assert table["throughput"].tolist() == [rate] and table["speed_up"].tolist() == [shown]
    assert f"speed-up {shown:.3g} [no interval]" in forecast_lines(table)[0]
    said = next(line for line in verdict(results, "GPUs", forecasts=[one]) if "Forecast" in line)
    assert f"speed-up {shown:.3g} over 1 GPU, no prediction interval; it missed the time" in said
    assert said.endswith("(step model with the measured links).")
    figure = forecast_figure(results, [one])
    assert figure is not None
    points = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert [list(p.get_ydata()) for p in points] == [[shown]]
    assert not [line for line in figure.axes[0].lines if line.get_label() == "forecast"]


def test_the_step_model_is_never_above_ideal(study: None) -> None:
    results = collect("s", write=False)
    found = forecasts(results, (16,), per_node=8)
    slow = [replace(f, base=replace(f.base, throughput=f.base.throughput / 20)) for f in found]
    (one,), _ = decided(results, slow, step_models(results, LINKS), LINKS)
    assert one.at(16).speed_up[0] == pytest.approx(16)


def test_runs_that_are_not_one_curve_are_refused(study: None) -> None:
    results = collect("s", write=False)
    results.runs.loc[0, "torch_version"] = "1.0"
    (one,) = step_models(results, LINKS)
    assert one.model is None and one.refused.startswith("not compared: torch_version differs")
    assert step_table([one]).notes == [f"No step model of ddp: {one.refused}."]


def comm_json(folder: Path, *lines: comm.Line) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "comm.json"
    write_json(path, comm.to_json({}, lines or [line("all_reduce", "all", 2, 1, FAST)]))
    return str(path)


def test_the_command(study: None, capsys, tmp_path: Path) -> None:
    assert main(["s", "--comm", comm_json(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 9 and said[0].startswith("step model: ddp: ")
    assert said[-1].startswith("limit: ddp: collectives were not measured on 4, 8 ranks: ")
    every = [line("all_reduce", "all", n, 1, FAST) for n in (2, 4, 8)]
    files = [comm_json(tmp_path / str(one.ranks), one) for one in every]
    assert main(["s", "--comm", *files]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_the_command_takes_a_collective_as_it_was_measured(capsys, tmp_path: Path) -> None:
    whole_study(strategies=("fsdp",), gpus=(1, 2, 4))
    slow = Link(1e-3, 1e-8)
    both = [line("all_reduce", "all", 2, 1, FAST), line("reduce_scatter", "all", 2, 1, slow)]
    said = []
    for lines in (both[:1], both):
        assert main(["s", "--comm", comm_json(tmp_path, *lines)]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] != said[1]


def test_what_cannot_be_used_is_one_line(study: None, capsys, tmp_path: Path) -> None:
    between = comm_json(tmp_path, line("all_reduce", "all", 2, 2, FAST))
    for words, text in (
        (["--comm", "absent.json"], "no file absent.json"),
        (["--comm", between], "no step model: ddp: the link inside a node is not known"),
    ):
        assert main(["s", *words]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and text in said.err
    with pytest.raises(SystemExit) as stop:
        main(["s"])
    assert stop.value.code == 2
    assert "the following arguments are required: --comm" in capsys.readouterr().err


def test_two_sizes_are_too_few(capsys, tmp_path: Path) -> None:
    whole_study("two", strategies=("ddp",), gpus=(1, 2))
    assert main(["two", "--comm", comm_json(tmp_path)]) == 2
    assert "3 sizes are needed" in capsys.readouterr().err


def test_the_report_has_the_held_out_sizes(study, tmp_path: Path, monkeypatch, capsys) -> None:
    # The figures take seconds, and are not what this is about.
    drawn = SimpleNamespace(paths=(), missing={})
    monkeypatch.setattr("jobkit.analysis.figures.draw.draw", lambda *_: drawn)
    assert cli.plot_main(["s", "--step-model", comm_json(tmp_path)]) == 0
    assert "held out: ddp: fitted to 1, 2, 4 ranks, 8 predicted " in capsys.readouterr().out
    html = (logs() / "s" / "report.html").read_text()
    assert "<h2>Step-time model, validated on held-out sizes</h2>" in html
    assert html.count("<td>1, 2</td>") == 2
    assert cli.plot_main(["s"]) == 0
    assert "held-out sizes" not in (logs() / "s" / "report.html").read_text()
    assert cli.plot_main(["s", "--step-model", str(tmp_path / "no.json")]) == 2


def test_a_held_out_size_that_was_missed_by_far_is_a_limit() -> None:
    def limit(*errors: float) -> str:
        tests = tuple(HeldOut((1, 2), 4, 1.0 + e, 1.0) for e in errors)
        return SeriesSteps("ddp", tests=tests).limit

    assert limit() == limit(0.05, -0.09) == ""
    assert limit(0.05, -0.27, 0.2) == "a held-out size was missed by -27%: so may larger ones be"
