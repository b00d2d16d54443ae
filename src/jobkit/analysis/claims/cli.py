"""`python -m jobkit check-claims FILE`: which claims about scaling follow from their own figures.

Recomputes speed-ups, efficiencies and rates from the times or rates of the same series, relative to
its smallest size. Every number is an interval, by its rounding, and so is the recomputed value: a
claim follows if the two intervals meet. What cannot be recomputed is listed as not judged.

It is more than a ratio of two numbers because a false alarm costs more than what is left unjudged:
most of it finds the series, the base and the rounding of a claim as published tables write them.
tests/bench/claims.py counts false alarms and misses.
"""

import csv
from collections.abc import Sequence

from jobkit.analysis.claims.judge import Work, check
from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.files import read_text

_EXAMPLES = """Claims are speed-ups, efficiencies and rates in tables (Markdown, CSV), in lines of
code blocks and lists such as "8 GPUs: 68 s/epoch (7.06x, 88 % efficiency)", and in sentences that
give one size with them. They are recomputed from the times or rates of their own series.

examples:
  python -m jobkit check-claims paper.md
  python -m jobkit check-claims claims.csv --samples 16000 --epochs 10

exit codes:
  0  every claim that could be judged follows
  2  wrong usage: a file that cannot be read, or no claim in it that can be judged
  4  a claim does not follow
"""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check a file of claims; return the exit code."""
    text = "Recompute the speed-ups, efficiencies and rates of published scaling results."
    parser = Parser(prog="jobkit check-claims", description=text, epilog=_EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="a Markdown, text or CSV file")
    parser.add_argument("--samples", type=float, metavar="N", help="training samples per epoch")
    parser.add_argument("--epochs", type=float, metavar="N", help="epochs in the table's times")
    parser.add_argument("--weak", action="store_true", help="weak scaling, whatever headings say")
    args = parser.parse_args(argv)
    samples, epochs = ([] if v is None else [v] for v in (args.samples, args.epochs))
    given = Work(samples, epochs, args.weak)
    try:
        verdicts = check(read_text(args.file), given)
    except (OSError, UnicodeDecodeError, UsageError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{args.file}: {reason}") from None
    judged = [v for v in verdicts if v.follows is not None]
    wrong = [v for v in judged if not v.follows]
    for v in wrong:
        print(f"line {v.line}: {v.said} does not follow: {v.how}")
    if judged:
        print(f"{args.file}: {len(judged) - len(wrong)} of {len(judged)} judged claims follow")
    unjudged: dict[str, list[str]] = {}
    for v in verdicts:
        if v.follows is None:
            unjudged.setdefault(v.how, []).append(f"{v.said} (line {v.line})")
    for why, said in unjudged.items():
        print(f"not judged, {why}: {', '.join(said)}")
    if not judged:
        why = "no table, line or sentence in it gives a speed-up, an efficiency or a rate"
        if verdicts:
            why = "no claim stands with the times or rates that it follows from"
        raise UsageError(f"{args.file}: nothing to check: {why}")
    return Exit.THRESHOLD if wrong else Exit.OK
