"""What is not true in the report of a study of a command, by its results.csv alone."""

import csv
import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, str]
Place = tuple[str, int, int]  # series, ranks, nodes
SIZE = r"(?P<ranks>\d+) (?:process(?:es)?|GPUs?|ranks?)(?: on (?P<nodes>\d+) nodes)?"
LEAST = 0.8
SOURCES = {
    "auto": "measured by the start-up hook",
    "meter": "measured by the meter",
    "lightning": "measured by the adapter for Lightning",
    "transformers": "measured by the adapter for Transformers",
    "accelerate": "measured by the adapter for Accelerate",
    "metric lines": "read from [METRIC] lines",
}
FIGURES = ("time_per_epoch",)  # of each study with a rate
OF_SIZES = ("throughput", "speed_up", "efficiency")  # where a series has two sizes


@dataclass
class Study:
    """The rows of a study, and what follows from them."""

    rows: list[Row]

    @property
    def ok(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "ok"]

    def rate(self, place: Place) -> float:
        """The median rate of a series at a size. Raises StatisticsError where it was not run."""
        own = [r for r in self.ok if place_of(r) == place]
        return median(float(r["throughput"]) for r in own)

    def places(self, series: str | None = None) -> list[Place]:
        """The sizes that were measured, small ones first."""
        found = {place_of(r) for r in self.ok if r["throughput"]}
        return sorted(p for p in found if series in (None, p[0]))

    def line(self, series: str) -> list[Place]:
        """The same of a series; of the sizes with as many ranks, that on the fewest nodes."""
        found: dict[int, Place] = {}
        for place in self.places(series):
            found.setdefault(place[1], place)
        return list(found.values())

    def efficiency(self, place: Place) -> float:
        base = self.places(place[0])[0]
        return self.rate(place) / self.rate(base) * base[1] / place[1]

    def unit(self, place: Place) -> str:
        return next(r["throughput_unit"] for r in self.ok if place_of(r) == place)


def place_of(row: Row) -> Place:
    return row["series"], int(row["world_size"]), int(row["nodes"])


def named(found: re.Match[str]) -> Place:
    """The series and size that a sentence names."""
    return found["series"], int(found["ranks"]), int(found["nodes"] or 1)


def close(said: str, value: float) -> bool:
    """Whether a number is the value, as far as it has digits."""
    return abs(float(said.replace(",", "")) - value) <= 6e-4 * abs(value)


def per_cent(said: str, value: float) -> bool:
    return abs(float(said) - 100 * value) <= (0.06 if "." in said else 0.6)


def _fastest(study: Study, found: re.Match[str]) -> bool:
    place = named(found)
    unit = f"{found['unit']}/{found['per'][0]}"
    alike = [study.rate(p) for p in study.places() if study.unit(p) == unit]
    return (
        study.unit(place) == unit
        and study.rate(place) == max(alike)
        and close(found["rate"], study.rate(place))
    )


def _request(study: Study, found: re.Match[str]) -> bool:
    own, place = study.line(found["series"]), named(found)
    after = own[own.index(place) + 1 :]
    if found["next"]:
        return own[0] == place and study.efficiency(after[0]) < LEAST
    if study.efficiency(place) < LEAST:
        return False
    more = study.efficiency(place) * place[1] / own[0][1]
    return (not after or study.efficiency(after[0]) < LEAST) and (
        abs(float(found["speed_up"]) - more) <= 0.006
    )


def _below(study: Study, found: re.Match[str]) -> bool:
    place = named(found)
    before = [p for p in study.line(place[0]) if p < place]
    here = study.efficiency(place)
    return (
        here < LEAST
        and per_cent(found["share"], here)
        and all(study.efficiency(p) >= LEAST for p in before)
    )


def _above(study: Study, found: re.Match[str]) -> bool:
    own = study.line(found["series"])
    return (
        own[-1] == named(found)
        and per_cent(found["share"], study.efficiency(own[-1]))
        and all(study.efficiency(p) >= LEAST for p in own)
    )


def _slower(study: Study, found: re.Match[str]) -> bool:
    base, *larger = study.line(found["series"])
    most = max(map(study.rate, larger)) / study.rate(base)
    return base == named(found) and most <= 1 and abs(float(found["most"]) - most) <= 0.006


def _ideal(study: Study, found: re.Match[str]) -> bool:
    """Of the first series: the others are named before the same dot."""
    over = study.efficiency(named(found))
    return over > 1.05 and per_cent(found["share"], over)


def _inferred(study: Study, found: re.Match[str]) -> bool:
    own = [r for r in study.ok if r["work_source"] == "inferred"]
    if found["count"] is None:
        return len(own) == len(study.ok) > 0
    return (int(found["count"]), int(found["of"])) == (len(own), len(study.ok))


def _uneven(study: Study, found: re.Match[str]) -> bool:
    factors: dict[tuple[str, int], list[float]] = {}
    for row in study.ok:
        if row["step_p99_s"] and int(row["steps_timed"]) >= 20:
            factor = float(row["step_p99_s"]) / float(row["step_p50_s"])
            factors.setdefault(place_of(row)[:2], []).append(factor)
    most = max(median(own) for own in factors.values())
    own = median(factors[found["series"], int(found["ranks"])])
    return own == most and abs(float(found["factor"]) - most) <= 0.006 * max(1, most)


def _outlying(study: Study, found: re.Match[str]) -> bool:
    """Each run that is named, by how far it is from the median of its size."""
    rows = {row["run_id"]: row for row in study.ok}
    named = re.findall(r"(\S+) \(([+-]\d+)%\)", found["runs"])
    shares = [float(rows[i]["throughput"]) / study.rate(place_of(rows[i])) - 1 for i, _ in named]
    return int(found["count"]) >= len(named) > 0 and all(
        abs(int(said) - 100 * share) <= 0.6 for (_, said), share in zip(named, shares, strict=True)
    )


def _chance(study: Study, found: re.Match[str]) -> bool:
    """What chance alone would give; which sizes differ is the tables' to say."""
    return int(found["differ"]) <= int(found["of"]) and (
        abs(float(found["chance"]) - 0.05 * int(found["of"])) <= 0.051
    )


def _counts(study: Study, found: re.Match[str]) -> bool:
    ok, count = len(study.ok), len(study.rows)
    if found["all"]:
        return ok == count == (1 if found["all"].startswith("The one") else int(found["every"]))
    others = dict(part.split(" ")[::-1] for part in found["others"].split(", "))
    real = {s: sum(r["status"] == s for r in study.rows) for s in others}
    return (int(found["ok"]), int(found["of"])) == (ok, count) and (
        {s: int(n) for s, n in others.items()} == real and sum(real.values()) == count - ok
    )


CHECKS: dict[str, Callable[[Study, re.Match[str]], Any]] = {
    rf".*caling.*: the fastest is (?P<series>.+) on {SIZE}, with (?P<rate>[\d,.]+) "
    r"(?P<unit>\w+) per (?P<per>second|hour)(?:\.|; not told apart from .*)": _fastest,
    rf"Request {SIZE} with (?P<series>.+): (?:(?P<next>the next size .* below 80% .*)|"
    r"speed-up (?P<speed_up>[\d.]+).*, parallel efficiency .*)": _request,
    rf"(?P<series>.+) (?:seems to fall|falls) below 80% parallel efficiency at {SIZE}: "
    r"(?P<share>[\d.]+)%.*": _below,
    r"(?P<series>.+) (?:seems to have|has) at least 80% parallel efficiency up to the largest "
    rf"measured size, {SIZE}: (?P<share>[\d.]+)%.*": _above,
    rf"(?P<series>.+): no larger size was faster than {SIZE}: "
    r"the highest speed-up is (?P<most>[\d.]+).*": _slower,
    rf"(?P<series>.+?) is measured at (?P<share>\d+)% of ideal scaling on {SIZE}.*": _ideal,
    r"(?P<series>.+) was measured at one size only: its scaling is unknown\.": (
        lambda study, found: len(study.places(found["series"])) == 1
    ),
    r"(?P<series>.+) was measured at one number of ranks only: its scaling is unknown\.": (
        lambda study, found: len({p[1] for p in study.places(found["series"])}) == 1
    ),
    r"(?P<count>\d+) runs? (?:is an outlier|are outliers), by the distance from the median of the "
    r"size: (?P<runs>.*%\)).*": _outlying,
    r"No size has two successful repeats, so .*": (
        lambda study, found: len({place_of(r) for r in study.ok}) == len(study.ok) > 0
    ),
    r"For the other (?P<count>\d+) series, see the table\.": (
        lambda study, found: int(found["count"]) == len({p[0] for p in study.places()}) - 1
    ),
    r"The rates(?: of (?P<count>\d+) of (?P<of>\d+) runs)? count samples inferred .*": _inferred,
    r"Single steps, (?:of|most uneven in) (?P<series>.+) on (?P<ranks>\d+) process(?:es)?: .* is "
    r"(?P<factor>[\d.]+) times the median\.": _uneven,
    r"(?P<differ>\d+) of (?P<of>\d+) comparisons .* about (?P<chance>[\d.]+)\.": _chance,
    r"(?P<all>All (?P<every>\d+) planned runs are ok\.|The one planned run is ok\.)|"
    r"(?P<ok>\d+) of (?P<of>\d+) planned runs (?:is|are) ok; (?P<others>.*)\.": _counts,
}


def untrue(folder: Path, every: bool = False) -> list[str]:
    """What is not true, or not there, of the report and the figures in a study's folder.

    every: a sentence of the conclusions that has no check here is a fault too. Which sentences
    there are is in part the machine's to say, as whether it counts energy.
    """
    with (folder / "results.csv").open() as file:
        study = Study(list(csv.DictReader(file)))
    page = (folder / "report.html").read_text()
    block = re.search(r'<section class="verdict".*?</section>', page, re.DOTALL)
    assert block is not None
    said = [html.unescape(text) for text in re.findall(r"<p[^>]*>(.*?)</p>", block[0])]
    wrong = [f"not true: {text}" for text in said if not _holds(study, text, not every)]
    return wrong + _facts(study, html.unescape(re.sub(r"<[^>]*>", " ", page))) + _drawn(
        study, folder / "figures"
    )  # fmt: skip


def _holds(study: Study, text: str, unchecked: bool) -> bool:
    """Whether a sentence of the conclusions holds; what has no check counts as unchecked."""
    for pattern, check in CHECKS.items():
        if found := re.fullmatch(pattern, text):
            return bool(check(study, found))
    return unchecked


def _facts(study: Study, text: str) -> list[str]:
    """What the rest of the report must say, or must not."""
    measured = [r for r in study.ok if r["throughput"]]
    sources = {r["throughput_source"] for r in measured}
    must = {SOURCES.get(s, s) for s in sources if not s.startswith("pattern ")}
    must |= {f"read by {s}" for s in sources if s.startswith("pattern ")}
    must |= {r["reason"] for r in study.rows if r["status"] != "ok" and r["reason"]}
    must |= {r["throughput_unit"] for r in measured}
    wrong = [f"it does not say: {words}" for words in sorted(must) if words not in text]
    must_not = {w for s, w in SOURCES.items() if s not in sources}
    if not any("start-up included" in source for source in sources):
        must_not |= {"start-up included"}
    if not any(r["throughput_unit"] == "images/s" for r in measured):
        must_not |= {"images"}
    return wrong + [f"it says: {words}" for words in sorted(must_not) if words in text]


def _drawn(study: Study, folder: Path) -> list[str]:
    """Figures that are missing or empty."""
    wanted = list(FIGURES) if study.places() else []
    names = {place[0] for place in study.places()}
    if any(len(study.places(name)) > 1 for name in names):
        wanted += OF_SIZES
    paths = [folder / f"{name}.{end}" for name in wanted for end in ("png", "svg")]
    return [f"no figure {p.name}" for p in paths if not p.is_file() or p.stat().st_size < 5000]
