"""report.html in a real browser: on a desk, on a phone, in the dark, on paper, and offline."""

import html
import re
import subprocess
from pathlib import Path

import pytest

from jobkit.analysis.collect.results import collect
from jobkit.analysis.figures.draw import FIGURES, draw
from jobkit.analysis.findings.forecast import forecasts
from jobkit.analysis.report.report import write_report
from support import needs
from support.realistic_study import realistic_study

pytestmark = pytest.mark.needs("chromium")

POLICY = r'<meta http-equiv="Content-Security-Policy"[^>]*>'
# Of a study on GPUs, which has no times of single steps; and without samples.
COUNT = len(FIGURES) - 3
PAPER_PX = round((210 - 2 * 14) / 25.4 * 96)  # A4 between its margins


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Load a page in a browser of its own; what it logs is on stderr."""
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    own = f"--user-data-dir={page.parent / 'profile'}"
    command = [str(needs.program("chromium")), *quiet, own, *options]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=480)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a study on GPUs: its figures and tables, a failed run and a forecast."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOBKIT_LOGS", str(folder))
        realistic_study("s", sizes=(1, 2, 4, "4x4"))
        results = collect("s")
        found = forecasts(results, (64,))
        drawn = draw(results, found)
        assert drawn.missing == {}
        write_report(results, drawn.paths, found)
    assert len(drawn.paths) == 2 * COUNT
    return folder / "s" / "report.html"


def test_there_is_no_error_and_nothing_is_asked_for(report: Path, tmp_path: Path) -> None:
    # The policy in the page forbids every request, and the browser's log names what it stopped.
    asking = tmp_path / "asking.html"
    asking.write_text(
        report.read_text().replace("</main>", "<img src='http://example.invalid/a'></main>")
    )
    done = browse(report, "--enable-logging=stderr", "--dump-dom")
    assert "</html>" in done.stdout
    assert "CONSOLE" not in done.stderr
    assert "example.invalid" in browse(asking, "--enable-logging=stderr", "--dump-dom").stderr


def framed(texts: list[tuple[str, int]], script: str) -> str:
    """A page that shows each text in a frame so many pixels wide, and asks each by a function."""
    frames = "".join(
        f'<iframe srcdoc="{html.escape(text)}" style="width:{width}px;height:900px"></iframe>'
        for text, width in texts
    )
    ask = (
        f"<script>const ask = d => {{ {script} }};"
        "onload = () => document.title = [...document.querySelectorAll('iframe')]"
        ".map(f => ask(f.contentDocument)).join(' | ')</script>"
    )
    return f"<!doctype html><html><body>{frames}{ask}</body></html>"


def asked(page: Path, texts: list[tuple[str, int]], script: str, *options: str) -> list[str]:
    # A script can only be asked on a copy: the report itself allows none.
    page.write_text(framed([(re.sub(POLICY, "", text), width) for text, width in texts], script))
    title = re.search(r"<title>(.*?)</title>", browse(page, "--dump-dom", *options).stdout)
    assert title is not None
    return title[1].split(" | ")


FIGURES_AND_WIDTH = (
    "const all = [...d.images], page = d.documentElement;"
    "const shown = i => i.naturalWidth > 0 && i.offsetWidth > 200 && i.offsetHeight > 50;"
    "const whole = i => i.offsetWidth <= i.parentNode.clientWidth;"
    "return [all.length, all.filter(shown).length, page.scrollWidth <= page.clientWidth,"
    " all.filter(whole).length].join(' ')"
)


def test_every_figure_shows_and_the_page_fits_a_desk_and_a_phone(report: Path, tmp_path) -> None:
    text = report.read_text()
    said = asked(tmp_path / "page.html", [(text, 390), (text, 1200)], FIGURES_AND_WIDTH)
    # On the phone the seven figures of one panel need no scrolling; the others scroll alone.
    assert said == [f"{COUNT} {COUNT} true 7", f"{COUNT} {COUNT} true {COUNT}"]


def test_on_paper_no_table_and_no_figure_is_cut(report: Path, tmp_path: Path) -> None:
    text = report.read_text().replace("@media print", "@media all")
    cut = (
        "return [...d.querySelectorAll('.scroll, pre')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).length"
    )
    assert asked(tmp_path / "page.html", [(text, PAPER_PX + 17), (text, 300)], cut)[0] == "0"
    pdf = tmp_path / "report.pdf"
    browse(report, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF")
    boxes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", content)
    assert len(boxes) > 3
    assert {(round(float(w)), round(float(h))) for w, h in boxes} <= {(595, 842), (594, 841)}


def test_in_the_dark_the_page_is_dark_and_the_figures_keep_their_paper(
    report: Path, tmp_path: Path
) -> None:
    colours = (
        "const of = e => d.defaultView.getComputedStyle(e).backgroundColor;"
        "return of(d.body) + ' ' + of(d.images[0])"
    )
    page, text = tmp_path / "page.html", [(report.read_text(), 800)]
    white = "rgb(255, 255, 255)"
    assert asked(page, text, colours) == [f"{white} {white}"]
    dark = asked(page, text, colours, "--blink-settings=preferredColorScheme=0")
    assert dark == [f"rgb(20, 23, 26) {white}"]
