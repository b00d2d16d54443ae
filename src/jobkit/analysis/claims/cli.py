"""`python -m jobkit check-claims FILE`: which speed-ups and efficiencies follow from their table.

Every number is an interval, by its rounding, and so is the value recomputed from the times or rates
of the same series, relative to its smallest size: a claim follows if the two intervals meet.
"""

from collections.abc import Sequence

from jobkit.analysis.claims.judge import Verdict, check
from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.files import read_text

_EXAMPLES = """Judged are speed-ups and efficiencies in tables (Markdown, CSV, LaTeX, aligned text)
with the size and a time or a rate beside them. What is not certain is not judged, and listed.

examples:
  python -m jobkit check-claims paper.md
  python -m jobkit check-claims logs/demo/scaling.tex

exit codes:
  0  every claim that could be judged follows
  2  wrong usage: a file that cannot be read, or no claim in it that can be judged
  4  a claim does not follow
"""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check a file of claims; return the exit code."""
    text = "Recompute the speed-ups and efficiencies of published scaling tables."
    parser = Parser(prog="jobkit check-claims", description=text, epilog=_EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="a Markdown, LaTeX, text or CSV file")
    parser.add_argument("--weak", action="store_true", help="weak scaling, whatever headings say")
    args = parser.parse_args(argv)
    try:
        verdicts = check(read_text(args.file), args.weak)
    except (OSError, UnicodeDecodeError, UsageError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{args.file}: {reason}") from None
    judged = [v for v in verdicts if v.follows is not None]
    wrong = [v for v in judged if not v.follows]
    for v in wrong:
        print(f"line {v.line}: {v.said} does not follow: {v.how}")
    if judged:
        print(f"{args.file}: {len(judged) - len(wrong)} of {len(judged)} judged claims follow")
    unjudged: dict[str, list[Verdict]] = {}
    for v in verdicts:
        if v.follows is None:
            unjudged.setdefault(v.how, []).append(v)
    for why, own in unjudged.items():
        print(f"not judged, {why}: {', '.join(f'{v.said} (line {v.line})' for v in own)}")
    if not judged:
        raise UsageError(f"{args.file}: nothing to check: no table with a claim that can be judged")
    return Exit.THRESHOLD if wrong else Exit.OK
