"""report.html and the tables beside it: what it says, that it is safe, whole and offline."""

import base64
import html
import re
from pathlib import Path

import pandas as pd
import pytest

from jobkit.analysis.cli import plot_main
from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.figures import draw as figures
from jobkit.analysis.figures.draw import draw
from jobkit.analysis.findings.forecast import forecasts
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.report.report import odd_runs, write_report
from jobkit.analysis.report.tables import proposal_table
from jobkit.analysis.tables.text import TextTable
from support import fake_study
from support.fake_study import FakeRun, logs, make_plan, whole_study
from support.measured_study import results_of

EVIL = "<script>alert(1)</script> & \"x\" 'y' <img src=http://example.com/a.png>"


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def report(results: Results, forecast: tuple[int, ...] = ()) -> str:
    write_report(results, [], *(forecasts(results, forecast) if forecast else []))
    return results.paths.report.read_text()


def test_all_is_there_safe_and_the_same_again(tmp_path: Path, monkeypatch) -> None:
    """Names, reasons, warnings and devices are what others wrote."""
    start = fake_study.start_fields
    monkeypatch.setattr(fake_study, "start_fields", lambda s: start(s) | {"device": EVIL})
    settings = {"model": "a.b:<script>x", "lr": 0.3}
    plan = make_plan(strategies=("ddp", "fsdp"), gpus=(1, 2, 4), repeats=2, settings=settings)
    for run_id, spec in plan.runs.items():
        run = FakeRun(plan.paths.folder, run_id, spec).begin()
        run.writer.write("message", level="warning", text=EVIL)
        if (spec.strategy, spec.world_size) == ("fsdp", 4):
            run.train(0).end("failed", f"rank 0: torch.OutOfMemoryError: {EVIL}", 1)
        else:
            run.train(0, 1, 2).end()
    results = collect("s")
    found, _ = forecasts(results, (8, 16))
    paths = draw(results, found)
    write_report(results, paths, found)
    page = results.paths.report.read_text()
    text = text_of(page)
    runs = results.runs
    assert all(run_id in text for run_id in runs["run_id"][runs["status"] != "ok"])
    assert text.count("torch.OutOfMemoryError") >= 2
    assert "/attempts/0/outcome.json" in text  # where the evidence stands
    images = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', page)
    drawn = [path for path in paths if path.suffix == ".svg"]
    assert images == [base64.b64encode(path.read_bytes()).decode() for path in drawn]
    settings = "lr 0.3 other settings at their default"
    for words in ("torch version 2.11.0", settings, "0" * 40, *verdict(results, "ranks")):
        assert " ".join(words.split()) in text
    # Nothing of a name becomes a tag, and nothing is asked for.
    assert not {*re.findall(r"<(\w+)", page)} & {"script", "iframe", "object", "link", "a"}
    assert text.count("<script>") >= 4
    assert len(re.findall(r"(?:src|href)\w*=\"", page)) == len(images)
    assert "url(" not in page and "@import" not in page
    assert "<script" not in results.paths.table_markdown.read_text().replace("\\<", "")
    # The same logs give the same bytes, and no path of the machine.
    write_report(results, paths, found)
    assert results.paths.report.read_text() == page and str(tmp_path) not in page


def test_a_forecast_is_marked_wherever_it_stands(capsys, monkeypatch) -> None:
    shown = [one for one in figures.FIGURES if one.name == "speed_up"]
    monkeypatch.setattr(figures, "FIGURES", shown)  # the others do not know of it
    whole_study(strategies=("ddp", "fsdp"), gpus=(1, 2, 4))
    assert plot_main(["s", "--collect", "--forecast", "6", "8", "400"]) == 0
    said, warned = capsys.readouterr()
    assert said.count("forecast (not measured):") == 1 and said.count("Not measured: ") == 1
    assert "no forecast: ddp: " in warned and "400 ranks" in warned
    folder = logs() / "s"
    table = pd.read_csv(folder / "forecast.csv")
    assert {*table["world_size"]} == {6, 8}
    page = (folder / "report.html").read_text()
    assert "Forecast: not measured" in page and "No forecast: ddp: the 95 % interval" in page
    # Without one, nothing of the old one is left.
    assert plot_main(["s"]) == 0
    assert not (folder / "forecast.csv").exists()
    assert "orecast: not measured" not in (folder / "report.html").read_text()


def test_an_outlier_bends_no_forecast_and_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_study("calm", strategies=("ddp",), gpus=(1, 2, 4), repeats=3)
    rate = fake_study.rate
    slow = lambda s: rate(s) * (0.6 if (s.world_size, s.repeat) == (4, 1) else 1)  # noqa: E731
    monkeypatch.setattr(fake_study, "rate", slow)
    whole_study("busy", strategies=("ddp",), gpus=(1, 2, 4), repeats=3)
    results = collect("busy")
    ((calm,), _), ((busy,), _) = forecasts(collect("calm"), (8,)), forecasts(results, (8,))
    assert busy.prediction.rate(8)[0] == pytest.approx(calm.prediction.rate(8)[0], rel=0.03)
    text = text_of(report(results, forecast=(8,)))
    assert "Runs to look at run status reason file evidence ddp-" in text
    monkeypatch.setattr("jobkit.analysis.report.report.MAX_LISTED", 0)
    assert odd_runs(results).notes == ["1 more are in results.csv."]
    assert "1 outlier among the repeats (" in text


def test_the_proposals_table_as_markdown_and_latex() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2), repeats=2)
    table = proposal_table(collect("s"), "GPUs")
    two = table.rows[1]
    assert two[:3] == ["ddp", "2", "2 of 2"] and two[4].startswith("1.90 [")
    assert table.heads[6:8] == ["GPU-hours per epoch", "node-hours per epoch"]
    assert table.notes[0].startswith("Strong scaling. Speed-up and parallel efficiency are ")
    assert table.markdown().splitlines()[1].count("---") == len(table.heads) == len(two)
    latex = table.latex()
    assert latex.count(r" \\") == 3
    assert r"\shortstack[r]{time per\\epoch (s)}" in latex
    body = latex[latex.index(r"\end{tabular}") :]
    assert "Strong scaling. Speed-up and parallel" in body  # what is printed has its caveats
    # What the base of each series is.
    series = {"slow": {1: [80.0]}, "near": {1: [99.0], 2: [150.0]}}
    results = results_of({"ddp": {1: [100.0], 2: [190.0]}, **series})
    words = "relative to the serial run of the study, ddp at 1 rank; else to the same strategy and "
    assert words in proposal_table(results, "GPUs").notes[0]
    # At 9 points a portrait page has room for some 90 characters; a head has lines of 11.
    heads = [max(map(len, head.split())) for head in table.heads]
    cells = [max(len(row[i]) for row in table.rows) for i in range(len(heads))]
    assert sum(map(max, heads, cells)) <= 90
    odd = TextTable(["a|b"], [["x_1 & 50% {y} \\z | <i> [1]\nnew"]])  # no cell breaks its table
    assert odd.markdown().splitlines()[2] == r"| x\_1 & 50% {y} \\z \| \<i\> \[1\] new |"
    cell = r"x\_1 \& 50\% \{y\} \textbackslash{}z | \textless{}i\textgreater{} {[}1] new \\"
    assert cell in odd.latex()
