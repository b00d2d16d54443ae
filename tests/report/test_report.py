"""report.html and the tables beside it: what it says, that it is safe, whole and offline."""

import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from jobkit.analysis.cli import plot_main
from jobkit.analysis.collect.results import collect
from jobkit.analysis.figures import draw as figures
from jobkit.analysis.figures.draw import draw
from jobkit.analysis.findings.forecast import forecasts
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.report.proposal import proposal_table
from jobkit.analysis.report.report import write_report
from jobkit.analysis.report.reproduce import study_file
from jobkit.analysis.tables.text import TextTable
from jobkit.spec.plan import Study
from support import fake_study
from support.fake_study import FakeRun, logs, make_plan, whole_run, whole_study

EVIL = "<script>alert(1)</script> & \"x\" 'y' <img src=http://example.com/a.png>"


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(name: str = "s", forecast: tuple[int, ...] = (), drawn: bool = False) -> str:
    results = collect(name)
    found = forecasts(results, forecast) if forecast else []
    write_report(results, draw(results, found).paths if drawn else [], found)
    return (logs() / name / "report.html").read_text()


def failing_study() -> None:
    plan = make_plan(strategies=("ddp", "fsdp"), gpus=(1, 2, 4), repeats=2)
    for run_id, spec in plan.runs.items():
        if (spec.strategy, spec.world_size) == ("fsdp", 4):
            run = FakeRun(plan.paths.folder, run_id, spec).begin().train(0)
            run.end("failed", f"rank 0: torch.OutOfMemoryError: {EVIL}", 1)
        else:
            run = whole_run(plan, run_id)


def test_every_run_figure_and_verdict_is_there_whole_and_the_same_again(tmp_path: Path) -> None:
    failing_study()
    html = report(forecast=(8, 16), drawn=True)
    page, results = Page(html), collect("s", write=False)
    for run in results.runs.to_dict("records"):
        assert run["run_id"] in page.text
    assert page.text.count("torch.OutOfMemoryError") >= 2
    assert "/attempts/0/outcome.json" in page.text  # where the evidence stands
    images = [a["src"] for tag, a in page.tags if tag == "img"]
    assert len(images) == len(list((logs() / "s" / "figures").glob("*.svg"))) > 8
    assert all(str(src).startswith("data:image/svg+xml;base64,") for src in images)
    for line in verdict(results, "processes (ranks)"):
        assert line in page.text
    for words in ("Some Processor", "torch version 2.11.0", "0" * 40, "epochs planned 3"):
        assert words in page.text
    # The same logs give the same bytes, and no path of the machine.
    moved = tmp_path / "elsewhere" / "s"
    shutil.copytree(logs() / "s", moved)
    results = collect(moved)
    found = forecasts(results, (8, 16))
    write_report(results, draw(results, found).paths, found)
    assert (moved / "report.html").read_text() == html
    assert str(tmp_path) not in html


def test_nothing_of_a_name_becomes_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, reasons, warnings and devices are what others wrote."""
    start = fake_study.start_fields
    monkeypatch.setattr(fake_study, "start_fields", lambda s: start(s) | {"device": EVIL})
    failing_study()
    plan = whole_study(strategies=("ddp",), gpus=(1, 2), settings={"model": "a.b:<script>x"})
    run_id = next(iter(plan.runs))
    run = FakeRun(plan.paths.folder, run_id, plan.runs[run_id], attempt=1).begin()
    run.writer.write("message", level="warning", text=EVIL)
    run.train(0, 1, 2).end()
    html = report(drawn=True)
    page = Page(html)
    assert not [tag for tag, _ in page.tags if tag in ("script", "iframe", "object", "link", "a")]
    assert "<script" not in html
    assert page.text.count("<script>") >= 4
    sources = [v for _, a in page.tags for k, v in a.items() if k in ("src", "href", "srcset")]
    assert all(str(v).startswith("data:image/svg+xml;base64,") for v in sources)
    assert "url(" not in html
    assert "@import" not in html
    markdown = (logs() / "s" / "scaling.md").read_text()
    assert "<script" not in markdown.replace("\\<", "")


def test_the_study_file_in_it_plans_the_same_runs(tmp_path: Path) -> None:
    plan = whole_study(
        strategies=("ddp",), gpus=(1, "2x2"), repeats=2, sweep={"precision": ("fp32", "bf16")}
    )
    text = re.search(r"toml:</p>\s*<pre>(.*?)</pre>", report(), re.S)
    assert text is not None
    file = tmp_path / "again.toml"
    file.write_text("".join(Page(text[1]).words))
    assert Study.load(file).expand().runs == plan.runs


def test_it_says_the_commands_that_made_it() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2, 4))
    given = ["--min-efficiency", "0.6", "--forecast", "8"]
    assert plot_main(["s", *given]) == 0
    html = (logs() / "s" / "report.html").read_text()
    text = re.search(r"<pre>(python run_benchmarks.*?)</pre>", html, re.S)
    assert text is not None
    assert text[1].splitlines()[1:] == [
        "python collect_results.py s",
        "python plot_results.py s --min-efficiency 0.6 --forecast 8",
    ]


def test_the_study_file_has_every_value_in_tomls_words(tmp_path: Path) -> None:
    """Also an empty string, and a number that is not finite."""
    study = Study(
        name="s",
        command=("train.py", "{tag}", "{lr}", ""),
        gpus=(1, "2x2"),
        parameters={"tag": "", "most": math.inf, "quote": 'a "b" \\', "on": True, "small": 1e-7},
        sweep={"lr": (1e-5, 0.5)},
    )
    study.expand().save()
    results = collect("s")
    file = tmp_path / "again.toml"
    file.write_text(study_file(results))
    assert Study.load(file) == study
    # Runs that another call planned under this name are not of this file.
    replace(study, command=("train.py", "{tag}", "{lr}", "more")).expand().save()
    first = study_file(collect("s")).splitlines()[0]
    assert first == "# Without 4 of the 8 runs, which calls with other values planned before."


def test_a_forecast_is_marked_wherever_it_stands(capsys, monkeypatch) -> None:
    shown = [one for one in figures.FIGURES if one.name in ("speed_up", "forecast")]
    monkeypatch.setattr(figures, "FIGURES", shown)  # the others do not know of it
    whole_study(strategies=("ddp", "fsdp"), gpus=(1, 2, 4))
    assert plot_main(["s", "--forecast", "8", "16", "4096"]) == 0
    said, warned = capsys.readouterr()
    assert said.count("forecast (not measured): ") == 4
    assert "no forecast: ddp: the 95 % interval of a forecast to 4096 ranks spans" in warned
    assert "caution: every measured size of ddp is on one node" in said
    table = pd.read_csv(logs() / "s" / "forecast.csv")
    assert set(table["kind"]) == {"forecast"}
    assert table["speed_up_low"].lt(table["speed_up"]).all()
    widths = (table["speed_up_high"] / table["speed_up_low"]).tolist()
    assert widths[1] > widths[0]
    html = (logs() / "s" / "report.html").read_text()
    assert "Forecast: not measured" in html
    assert "Forecast, not measured: ddp on 16 processes" in html
    assert (logs() / "s" / "figures" / "forecast.png").exists()
    # Without one, nothing of the old one is left.
    assert plot_main(["s"]) == 0
    assert not (logs() / "s" / "forecast.csv").exists()
    assert not (logs() / "s" / "figures" / "forecast.png").exists()
    assert "orecast, not measured" not in (logs() / "s" / "report.html").read_text()


def test_a_forecast_from_too_few_sizes_or_of_a_measured_one_is_refused(capsys) -> None:
    whole_study("two", strategies=("ddp",), gpus=(1, 2), repeats=3)
    assert plot_main(["two", "--forecast", "16"]) == 2
    said = capsys.readouterr().err
    assert "no forecast: ddp: 3 different sizes are needed for a fit (measured: 1, 2)" in said
    whole_study("three", strategies=("ddp",), gpus=(1, 2, 4))
    assert plot_main(["three", "--forecast", "3"]) == 2
    assert "measured up to 4" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        plot_main(["three", "--forecast", "0"])


def test_an_outlier_bends_no_forecast_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_study("calm", strategies=("ddp",), gpus=(1, 2, 4), repeats=3)
    rate = fake_study.rate
    slow = lambda s: rate(s) * (0.6 if (s.world_size, s.repeat) == (4, 1) else 1)  # noqa: E731
    monkeypatch.setattr(fake_study, "rate", slow)
    whole_study("busy", strategies=("ddp",), gpus=(1, 2, 4), repeats=3)
    (calm,), (busy,) = (forecasts(collect(name), (8,)) for name in ("calm", "busy"))
    assert (calm.left_out, busy.left_out) == (0, 1)
    assert busy.prediction.rate(8) == pytest.approx(calm.prediction.rate(8), rel=0.03)
    page = Page(report("busy", forecast=(8,)))
    assert "ddp: fitted without 1 outlier." in page.text
    assert "outlier among the repeats" in page.text


def test_a_single_point_gives_a_table_and_no_fit() -> None:
    whole_study(strategies=("ddp",), gpus=(1,))
    page = Page(report())
    assert "No fit: ddp: 3 different sizes are needed" in page.text
    assert "ddp was measured at one size only: its scaling is unknown." in page.text
    assert "Request" not in page.text
    assert "| ddp | strong | 1 | 1 |" in (logs() / "s" / "scaling.md").read_text()


def said_of(**fields) -> list[str]:
    whole_study(**fields)
    return verdict(collect("s"), "GPUs", least=0.93)


def test_the_verdict_names_the_best_the_limit_and_what_to_ask_for() -> None:
    lines = said_of(strategies=("ddp", "fsdp"), gpus=(1, 2, 4), repeats=2)
    assert lines[0].startswith("Strong scaling: the fastest is ddp on 4 GPUs, with 3,737 images")
    assert lines[1].startswith("Request 2 GPUs with ddp: speed-up 1.90 [95%: ")
    assert lines[2].startswith("4 more repeats of ddp on 1 and 2 GPUs (0.067 node-hours) would ")
    assert lines[3].startswith("ddp seems to fall below 93% parallel efficiency at 4 GPUs: 92.5% [")
    assert "(uncertain: the interval includes 93%)" in lines[3]
    assert lines[-1] == "All 12 planned runs are ok."


def test_the_verdict_of_one_repeat_says_that_it_may_be_noise() -> None:
    lines = said_of(strategies=("ddp",), gpus=(1, 2), settings={"epochs": 1})
    assert any("two successful repeats, so differences may be noise" in line for line in lines)


def test_the_verdict_of_many_series_keeps_to_the_best() -> None:
    rates = tuple(round(0.01 * i, 2) for i in range(1, 9))
    lines = said_of(strategies=("ddp",), gpus=(1, 4), sweep={"lr": rates})
    assert sum("seems to fall below" in line for line in lines) == 1
    assert "For the other 7 series, see the table." in lines


def test_the_verdict_where_nothing_was_measured() -> None:
    make_plan(strategies=("ddp",), gpus=(1, 2))
    lines = verdict(collect("s"), "GPUs")
    assert lines[0].startswith("Nothing was measured")
    assert lines[1] == "0 of 2 planned runs are ok; 2 missing."


def test_the_proposals_table_as_markdown_and_latex() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2), repeats=2)
    table = proposal_table(collect("s").scaling, "GPUs")
    two = table.rows[1]
    assert two[:4] == ["ddp", "strong", "2", "1"]
    assert two[5].startswith("1.90 [")
    assert table.heads[7:9] == ["GPU-hours per epoch", "node-hours per epoch"]
    lines = table.markdown().splitlines()
    assert lines[1].count("---") == len(table.heads) == len(two)
    assert table.latex().count(r" \\") == 3
    assert any("smallest measured size" in note for note in table.notes)


def test_no_cell_breaks_its_table() -> None:
    table = TextTable(["a|b"], [["x_1 & 50% {y} \\z | <i> [1]\nnew"]])
    row = table.markdown().splitlines()[2]
    assert row == r"| x\_1 & 50% {y} \\z \| \<i\> \[1\] new |"
    latex = table.latex()
    assert r"x\_1 \& 50\% \{y\} \textbackslash{}z | <i> {[}1] new \\" in latex


def test_a_report_that_cannot_be_written_is_one_line(capsys) -> None:
    whole_study(strategies=("ddp",), gpus=(1,))
    (logs() / "s" / "report.html").mkdir()
    assert plot_main(["s"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
