"""Exercises in distributed training.

Without a number they are listed. With one, a probe runs on this machine and prints what it
measured. --skeleton writes the file to complete, --check runs it on two ranks and says what is
wrong. docs/exercises has the questions and answers.
"""

import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import Exit, Parser, UsageError, command, one_of
from jobkit.exercise.catalogue import EXERCISES, Exercise

EPILOG = """examples:
  python -m jobkit exercise                                  list them
  python -m jobkit exercise 3.1                              run its probe
  python -m jobkit exercise 4.1 --skeleton my_ddp.py         write the file to complete
  python -m jobkit exercise 4.1 --check my_ddp.py            check it on two ranks

exit codes:
  0  the probe ran, the file was written, or the check found nothing wrong
  1  a probe could not be measured
  2  wrong usage: no such exercise or file
  4  the check found something wrong
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(prog="jobkit exercise", description=__doc__.splitlines()[0], epilog=EPILOG)
    made.add_argument(
        "number", nargs="?", metavar="NUMBER", help="an exercise, as 3.1 (default: list them)"
    )
    what = made.add_mutually_exclusive_group()
    what.add_argument("--skeleton", metavar="FILE", help="write the file to complete")
    what.add_argument("--check", metavar="FILE", help="run a completed file on two ranks, judge it")
    return made


def _listed() -> list[str]:
    """One line for each exercise."""
    lines = ["exercises (docs/exercises has the questions):"]
    for each in EXERCISES.values():
        what = f"{each.title}; complete {each.file}" if each.file else each.title
        lines.append(f"  {each.number}  {what}")
    return [*lines, "", "'python -m jobkit exercise NUMBER' runs the probe of one"]


def _probe(exercise: Exercise) -> int:
    """Run each probe of an exercise and print its tables."""
    begun = time.monotonic()
    for name in exercise.probes:
        module, _, function = name.partition(":")
        found = importlib.import_module(f"jobkit.exercise.probes.{module}")
        try:
            tables = getattr(found, function)()
        except RuntimeError as error:
            print(f"jobkit: error: exercise {exercise.number}: {error}", file=sys.stderr)
            return Exit.FAILED
        for table in tables:
            print(table.text(), end="\n\n", flush=True)
    print(f"measured in {time.monotonic() - begun:.1f} s", end="")
    print(f"; the answer: docs/exercises/{exercise.page}.md")
    return Exit.OK


def _complete(exercise: Exercise, option: str) -> None:
    """Raise UsageError where an exercise has no file to complete."""
    if not exercise.check:
        known = ", ".join(each.number for each in EXERCISES.values() if each.check)
        raise UsageError(f"exercise {exercise.number} has no file for {option} (these do: {known})")


def _write(exercise: Exercise, file: str) -> int:
    """Write the file to complete; an existing one is left as it is."""
    _complete(exercise, "--skeleton")
    path = Path(file)
    try:
        with path.open("x", encoding="utf-8") as out:
            out.write(exercise.skeleton.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UsageError(f"{file} is there already: choose another name") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    print(f"{file}: complete it, then 'python -m jobkit exercise {exercise.number} --check {file}'")
    return Exit.OK


def _check(exercise: Exercise, file: str) -> int:
    """Check a completed file; 4 where something is wrong."""
    _complete(exercise, "--check")
    if not (Path(file).is_file() and os.access(file, os.R_OK)):
        raise UsageError(f"{file}: no file that can be read; --skeleton FILE writes one")
    module = importlib.import_module(f"jobkit.exercise.checks.{exercise.check}")
    remarks = module.run(str(Path(file).resolve()))
    for each in remarks:
        print("ok   " if each.ok else "WRONG", each.text)
    wrong = sum(not each.ok for each in remarks)
    print(f"{file}: {wrong} wrong" if wrong else f"{file}: all is right")
    return Exit.THRESHOLD if wrong else Exit.OK


@command
def main(argv: Sequence[str] | None = None) -> int:
    """List, run, write or check; return the exit code."""
    args = parser().parse_args(argv)
    if args.number is None:
        if args.skeleton or args.check:
            raise UsageError("which exercise? as: python -m jobkit exercise 4.1 --check FILE")
        print("\n".join(_listed()))
        return Exit.OK
    one_of("exercise", args.number, EXERCISES)
    exercise = EXERCISES[args.number]
    if args.skeleton:
        return _write(exercise, args.skeleton)
    return _check(exercise, args.check) if args.check else _probe(exercise)


if __name__ == "__main__":
    sys.exit(main(None))
