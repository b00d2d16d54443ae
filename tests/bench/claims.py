"""How often check-claims is wrong: made-up claims of known truth, and published scaling tables.

A false alarm is a right claim that is said not to follow; a miss is a wrong one that is said to
follow. Right is what values that are rounded, or cut, to the printed ones can give. Of the
published tables (published_claims.md) every second one is held out: --held-out reads those.

    python tests/bench/claims.py                 2,000 made-up documents, and the first half
    python tests/bench/claims.py --held-out      the other half of the published tables
"""

import argparse
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src")]
from jobkit.analysis.claims.judge import check  # noqa: E402

PUBLISHED = Path(__file__).with_name("published_claims.md")
Mark = tuple[int, str, bool]  # line, claim as written, whether it is wrong
Document = tuple[str, list[Mark]]
Rows = list[tuple[int, float, list[str]]]  # size, time, claims


class Study:
    """A made-up study: times of an Amdahl's law, as printed, and claims on them."""

    def __init__(self, draw: random.Random, unit: str = "x", weak: bool = False) -> None:
        self.draw, self.weak = draw, weak
        first = draw.choice([1, 1, 1, 2, 4, 8])
        self.sizes = [first * 2**i for i in range(draw.randint(2, 5))]
        serial, one = 10 ** draw.uniform(-3, -1), 10 ** draw.uniform(0.7, 3.5)
        law = [1 / n + serial * (1 - 1 / n) for n in self.sizes]
        self.true = [one * t * (n if weak else 1) for t, n in zip(law, self.sizes, strict=True)]
        self.places = draw.choice([p for p in (0, 1, 2, 3, 4) if self.true[-1] * 10**p > 20])
        self.times = [f"{t:.{self.places}f}" for t in self.true]
        self.wrong = draw.choice([0, 0, *range(1, len(self.sizes))])
        self.claims = [self._claim(i, unit) for i in range(len(self.sizes))]

    def _claim(self, i: int, unit: str) -> str:
        """The claim of a size; that of the wrong one is beyond what rounding explains."""
        grown = self.sizes[i] / self.sizes[0]
        factor = (grown if self.weak else 1) * (100 / grown if unit == "%" else 1)
        half = 0.5 * 10**-self.places
        one, at = float(self.times[0]), float(self.times[i])
        value = factor * self.true[0] / self.true[i]
        places = self.draw.choice([0, 1] if unit == "%" else [1, 2])
        if i and i == self.wrong:
            low, high = factor * (one - half) / (at + half), factor * (one + half) / (at - half)
            step = 10**-places
            error = 1 + self.draw.uniform(0.01, 0.25)
            value = self.draw.choice([high * error + step, (low - step * 1.6) / error])
        return f"{value:.{places}f}"

    def marks(self, first: int, unit: str = "") -> list[Mark]:
        """The claims on the lines from the first one on, one line a size."""
        return [(first + i, c, i == self.wrong and i > 0) for i, c in enumerate(self.claims)][1:]


def _markdown(draw: random.Random) -> Document:
    """A table of times, with other columns about it."""
    study = Study(draw)
    head = draw.choice(
        ["Time (s)", "Training time [min]", "s/epoch", "Wall time (ms)", "time (us)"]
    )
    size = draw.choice(["GPUs", "# GPUs", "Number of GPUs", "Ranks", "Nodes", "Workers"])
    name = draw.choice(["Speedup", "Speed-up", "speed up (x)", "Speedup vs 1 GPU"])
    lines = [f"| GPU | {size} | Batch size | {head} | Ideal speedup | {name} | Utilization |"]
    lines.append("|---|---|--:|---|---|---|---|")
    for n, time, claim in zip(study.sizes, study.times, study.claims, strict=True):
        cells = [
            "A100",
            str(n),
            "256",
            time,
            f"{n}.0",
            draw.choice([claim, f"**{claim}x**"]),
            "97%",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["# Results", "", *lines]), study.marks(5)


def _efficiency(draw: random.Random) -> Document:
    """Efficiencies from rates, in one of the ways to write thousands."""
    study = Study(draw, "%")
    rates = [1e7 / t for t in study.true]
    write = draw.choice(
        [
            lambda r: f"{r:,.0f}",
            lambda r: f"{r:,.0f}".replace(",", " "),
            lambda r: f"{r:,.1f}".replace(",", "~").replace(".", ",").replace("~", "."),
            lambda r: f"{r / 1e3:.3f}K" if r < 1e6 else f"{r / 1e6:.5f}M",
        ]
    )
    study.times, marks = [write(r) for r in rates], []
    lines = ["| GPUs | images/s | efficiency |", "|--|--|--|"]
    for i, n in enumerate(study.sizes):
        value = 100 * study.true[0] * study.sizes[0] / study.true[i] / n
        wrong = 0 < i == study.wrong
        said = f"{value * (draw.choice([0.9, 1.07]) if wrong else 1):.1f}%"
        lines.append(f"| {n} | {study.times[i]} | {said} |")
        marks.append((3 + i, said.rstrip("%"), wrong))
    return "\n".join(lines), marks[1:]


def _csv(draw: random.Random) -> Document:
    study = Study(draw)
    mark = draw.choice([",", ";", "\t"])
    decimal = "," if mark == ";" else "."
    rows = [["ranks", "time_s", "speed_up"]]
    rows += map(list, zip(map(str, study.sizes), study.times, study.claims, strict=True))
    lines = [mark.join(cell.replace(".", decimal) for cell in row) for row in rows]
    return "\n".join(lines), [(n, c.replace(".", decimal), w) for n, c, w in study.marks(2)]


def _lines(draw: random.Random) -> Document:
    """A code block or a list: one line a size, and lines of other figures."""
    study = Study(draw)
    mark = draw.choice(["", "- ", "* "])
    lines = ["## Scaling", "", *([] if mark else ["```"])]
    start = len(lines) + 2
    lines.append(f"{mark}Hardware: 8x NVIDIA V100 (32GB), overhead 3.2%")
    for n, time, claim in zip(study.sizes, study.times, study.claims, strict=True):
        said = f" ({claim}x speedup)" if n > study.sizes[0] else ""
        lines.append(f"{mark}{n} GPU{'s' * (n > 1)}: {time}s/epoch{said}, utilization 91%")
    return "\n".join([*lines, *([] if mark else ["```"])]), study.marks(start)


def _two_series(draw: random.Random) -> Document:
    """Two series in one table, each with its own base, or on that of the first."""
    one, two = Study(draw), Study(draw)
    shared = draw.random() < 0.5
    lines = ["| Strategy | GPUs | Time (s) | Speedup |", "|--|--|--|--|"]
    marks = []
    for name, study in (("DDP", one), ("FSDP", two)):
        marks += study.marks(len(lines) + 1)
        for n, time, claim in zip(study.sizes, study.times, study.claims, strict=True):
            lines.append(f"| {name} | {n} | {time} | {claim}x |")
    if shared:  # FSDP relative to the smallest size of DDP, which it was not measured at
        lines, marks = lines[: 2 + len(one.sizes)], one.marks(3)
        for n, time in zip(one.sizes[1:], one.true[1:], strict=True):
            said = f"{float(one.times[0]) / float(f'{1.1 * time:.{one.places}f}'):.2f}"
            marks.append((len(lines) + 1, said, False))
            lines.append(f"| FSDP | {n} | {1.1 * time:.{one.places}f} | {said}x |")
    return "\n".join(lines), marks


def _weak(draw: random.Random) -> Document:
    study = Study(draw, "%", weak=True)
    lines = ["### Weak Scaling", "", "| Nodes | Time | Efficiency |", "|--|--|--|"]
    for n, time, claim in zip(study.sizes, study.times, study.claims, strict=True):
        lines.append(f"| {n} | {time} s | {claim} % |")
    return "\n".join(lines), study.marks(5)


def _other_factors(draw: random.Random) -> Document:
    """Speed-ups that are not over sizes, beside some that are: none of them is wrong."""
    study = Study(draw)
    lines = ["| GPUs | FP32 img/s | mixed img/s | Speedup (FP32 - mixed) | Weak scaling - mixed |"]
    lines, marks = [*lines, "|--|--|--|--|--|"], []
    base = round(1e6 / study.true[0])
    for i, n in enumerate(study.sizes):
        slow, fast = round(1e6 / study.true[i] / 2.4), round(1e6 / study.true[i])
        said = f"{fast / base * (1.2 if 0 < i == study.wrong else 1):.2f}"
        lines.append(f"| {n} | {slow} | {fast} | {fast / slow:.2f}x | {said} |")
        marks += [(3 + i, f"{fast / slow:.2f}", False), (3 + i, said, 0 < i == study.wrong)]
    return "\n".join(lines), marks


def _sentence(draw: random.Random) -> Document:
    """A sentence beside a table, and others that say nothing of it."""
    study = Study(draw)
    i = study.wrong or len(study.sizes) - 1
    n, claim = study.sizes[i], study.claims[i]
    told = draw.choice(
        [
            f"We reach a speed-up of {claim}x on {n} GPUs.",
            f"On {n} GPUs it is {claim}x faster.",
            f"The {n}-GPU run is {claim} times faster.",
            f"Training speeds up {claim}x with {n} GPUs.",
        ]
    )
    other = draw.choice(
        [
            f"GPU utilisation was 98 % on {n} GPUs.",
            f"Accuracy: 93.1 % at {n} GPUs.",
            f"It is 2x faster on {n} GPUs than last year's code.",
            f"An ideal speed-up would be {n}x on {n} GPUs.",
            "We use 4x less memory with sharding on 8 GPUs.",
            "The BF16 speed-up is 2.4x.",
        ]
    )
    table = ["| GPUs | Time (s) |", "|--|--|"]
    table += [f"| {s} | {t} |" for s, t in zip(study.sizes, study.times, strict=True)]
    marks = [(1, claim, i == study.wrong)]
    marks += [(3, said, False) for said in re.findall(r"[\d.]+(?=x| %)", other)]
    return "\n".join([told, "", other, "", *table]), marks


FORMATS: tuple[Callable[[random.Random], Document], ...] = (
    *(_markdown, _efficiency, _csv, _lines, _two_series, _weak, _other_factors),
    _sentence,
)


def published(held_out: bool) -> Iterator[tuple[str, Document]]:
    """One half of the published tables, with their marks."""
    sections = PUBLISHED.read_text(encoding="utf-8").split("\n## ")[1:]
    for section in sections[int(held_out) :: 2]:
        lines = section.splitlines()
        wrong = {tuple(map(int, w.split(":"))) for w in re.findall(r"\d+:\d+", lines[2])}
        marks = []
        for i, line in enumerate(lines[6:], 1):
            for j, cell in enumerate(line.strip("| ").split(" | "), 1):
                if found := re.search(r"\d[\d.]*", cell):
                    marks.append((6 + i, found[0], (i, j) in wrong))
        yield "published", ("\n".join(lines), marks)


def _digits(text: str) -> str:
    found = re.search(r"\d[\d.]*", text.replace(",", "."))
    return found[0] if found else text


def judge(document: Document) -> Counter[str]:
    """How the claims of one document were judged."""
    text, marks = document
    told: dict[tuple[int, str], list[bool | None]] = defaultdict(list)
    for verdict in check(text):
        if verdict.follows is None and verdict.claim.kind in ("rate", "memory"):
            continue  # what claims follow from, which no mark is of
        said = _digits(verdict.claim.number.text)
        told[verdict.line, said].append(verdict.follows)
    made: Counter[str] = Counter()
    for line, said, wrong in marks:
        answers = told.get((line, _digits(said)), [])
        if answers:
            made[f"{'wrong' if wrong else 'right'} {answers.pop(0)}"] += 1
        else:
            made["wrong unread" if wrong else "unread"] += 1
    return made


def row(name: str, documents: int, c: Counter[str]) -> str:
    """A row of the table."""
    right, wrong = c["right True"] + c["right False"], c["wrong True"] + c["wrong False"]
    unsure = c["right None"] + c["wrong None"] + c["wrong unread"]
    cells = [
        name,
        str(documents),
        str(right),
        str(c["right False"]),
        str(wrong),
        str(c["wrong True"]),
    ]
    share = [f"{c['right False'] / max(1, right):.1%}", f"{c['wrong True'] / max(1, wrong):.1%}"]
    return f"| {' | '.join([*cells, str(unsure), *share])} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", action="store_true")
    args = parser.parse_args(argv)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    documents: Counter[str] = Counter()
    made: list[tuple[str, Document]] = []
    for i in range(0 if args.held_out else args.documents):
        form = FORMATS[i % len(FORMATS)]
        made.append(
            (form.__name__.strip("_").replace("_", " "), form(random.Random(args.seed + i)))
        )
    for name, document in (*made, *published(args.held_out)):
        for key in (name, *(() if name == "published" else ("all made up",))):
            found[key] += judge(document)
            documents[key] += 1
    heads = "documents, right, false alarms, wrong, missed, not judged, false alarms %, misses %"
    print(f"| claims | {heads.replace(', ', ' | ')} |\n|--|{'--:|' * 8}")
    for name, counts in found.items():
        print(row(name, documents[name], counts))


if __name__ == "__main__":
    main()
