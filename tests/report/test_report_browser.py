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
from support.fake_study import realistic_study

pytestmark = pytest.mark.needs("chromium")

POLICY = r'<meta http-equiv="Content-Security-Policy"[^>]*>'
COUNT = len(FIGURES)
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
        realistic_study(sizes=(1, 2, 4, "4x4"))
        results = collect("s")
        found, _ = forecasts(results, (64,))
        drawn = draw(results, found)
        write_report(results, drawn, found)
    assert len(drawn) == 3 * COUNT
    return folder / "s" / "report.html"


def test_there_is_no_error_and_nothing_is_asked_for(report: Path, tmp_path: Path) -> None:
    """The policy in the page forbids every request, and the browser's log names what it stopped:
    of a copy that asks for an image, that alone.
    """
    asking = tmp_path / "asking.html"
    image = "<img src='http://example.invalid/a'>"
    asking.write_text(report.read_text().replace("</main>", f"{image}</main>"))
    done = browse(asking, "--enable-logging=stderr", "--dump-dom")
    assert "</html>" in done.stdout
    logged = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert logged and not [line for line in logged if "example.invalid" not in line]


def asked(page: Path, texts: list[tuple[str, int]], script: str, *options: str) -> list[str]:
    """What a function says of each text, shown in a frame so many pixels wide."""
    # A script can only be asked on a copy: the report itself allows none.
    frames = "".join(
        f'<iframe srcdoc="{html.escape(re.sub(POLICY, "", text))}" style="width:{width}px;'
        'height:900px"></iframe>'
        for text, width in texts
    )
    page.write_text(
        f"<!doctype html><html><body>{frames}<script>const ask = d => {{ {script} }};"
        "onload = () => document.title = [...document.querySelectorAll('iframe')]"
        ".map(f => ask(f.contentDocument)).join(' | ')</script></body></html>"
    )
    title = re.search(r"<title>(.*?)</title>", browse(page, "--dump-dom", *options).stdout)
    assert title is not None
    return title[1].split(" | ")


SCRIPT = (
    "const all = [...d.images], page = d.documentElement;"
    "const shown = i => i.naturalWidth > 0 && i.offsetWidth > 200 && i.offsetHeight > 50;"
    "const whole = i => i.parentNode.scrollWidth <= i.parentNode.clientWidth + 1;"
    "const cut = [...d.querySelectorAll('.scroll')]"
    ".filter(e => e.scrollWidth > e.clientWidth + 1);"
    "const of = e => d.defaultView.getComputedStyle(e).backgroundColor;"
    "return [all.length, all.filter(shown).length, page.scrollWidth <= page.clientWidth,"
    " all.filter(whole).length, cut.length, of(d.body), of(all[0])].join('; ')"
)


def test_the_page_fits_phone_desk_and_paper_and_is_dark_in_the_dark(report, tmp_path) -> None:
    text, dark = report.read_text(), "--blink-settings=preferredColorScheme=0"
    printed = text.replace("@media print", "@media all")
    pages = [(text, 390), (text, 1200), (printed, PAPER_PX + 17)]
    said = asked(tmp_path / "page.html", pages, SCRIPT, dark)
    phone, desk, paper = (one.split("; ") for one in said)
    # On the phone the five figures of one panel need no scrolling; the others scroll alone.
    assert phone[:4] == [str(COUNT), str(COUNT), "true", "5"]
    assert desk[:4] == [str(COUNT), str(COUNT), "true", str(COUNT)]
    assert paper[4] == "0", "a table or a figure is cut on paper"
    assert desk[5:] == ["rgb(20, 23, 26)", "rgb(255, 255, 255)"], "figures keep their paper"
