"""Exercises in distributed training: `python -m jobkit exercise`.

Each is a script in docs/exercises, which measures something on this machine; the chapters beside it
have the questions and the answers. Five have a file to complete, and a check that runs it.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import Exit, Parser, UsageError, command, one_of
from jobkit.paths import REPOSITORY

FOLDER = REPOSITORY / "docs" / "exercises"
_STUDY = (
    "run --site local --study demo --strategies ddp fsdp --train-samples 1024 "
    "--test-samples 256 --epochs 3 --global-batch-size 64 --lr 0.02 --name "
)
# Those that are commands of jobkit, and no script.
COMMANDS = {
    "6.2": [f"{_STUDY}exercise-6 --gpus 2"],
    "7.1": [f"{_STUDY}exercise-7 --gpus 1 2", "collect exercise-7"],
    "7.2": ["plot exercise-7"],
}
EPILOG = """examples:
  python -m jobkit exercise                                  list them
  python -m jobkit exercise 3.1                              measure
  python -m jobkit exercise 4.1 --skeleton my_ddp.py         write the file to complete
  python -m jobkit exercise 4.1 --check my_ddp.py            check it on two ranks

exit codes: 0 ok; 1 it could not be measured; 2 wrong usage; 4 the check found something wrong
"""


def read_exercises() -> dict[str, tuple[str, Path]]:
    """The title and the page of each exercise by its number, from the headings of the chapters."""
    heading = re.compile(r"^## ([\d.]+) (.+)$", re.MULTILINE)
    pages = {page: page.read_text("utf-8") for page in sorted(FOLDER.glob("*.md"))}
    return {m[1]: (m[2], page) for page, text in pages.items() for m in heading.finditer(text)}


@command
def main(argv: Sequence[str] | None = None) -> int:
    """List, run, write or check; return the exit code."""
    parser = Parser(
        prog="jobkit exercise",
        description="Exercises in distributed training, each measured on this machine.",
        epilog=EPILOG,
    )
    parser.add_argument("number", nargs="?", help="an exercise, as 3.1 (default: list them)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--skeleton", metavar="FILE", help="write the file to complete")
    what.add_argument("--check", metavar="FILE", help="run a completed file on two ranks, judge it")
    args = parser.parse_args(argv)
    exercises = read_exercises()
    skeletons = {path.stem: path for path in sorted((FOLDER / "skeletons").glob("*.txt"))}
    if args.skeleton or args.check:
        if args.number is None:
            raise UsageError("which exercise? as: python -m jobkit exercise 4.1 --check FILE")
        one_of("exercise with a file to complete", args.number, skeletons)
    if args.number is None:
        print("exercises (docs/exercises has the questions):")
        for number, (title, _) in exercises.items():
            print(f"  {number}  {title}{'; a file to complete' if number in skeletons else ''}")
        print("\n'python -m jobkit exercise NUMBER' measures one")
        return Exit.OK
    one_of("exercise", args.number, exercises)
    if args.skeleton:
        try:
            with Path(args.skeleton).open("x", encoding="utf-8") as out:
                out.write(skeletons[args.number].read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{args.skeleton}: {error.strerror}") from None
        check = f"'python -m jobkit exercise {args.number} --check {args.skeleton}'"
        print(f"{args.skeleton}: complete it, then {check}")
        return Exit.OK
    if args.check:
        if not Path(args.check).is_file():
            raise UsageError(f"{args.check}: no such file; --skeleton FILE writes one")
        words = [sys.executable, str(FOLDER / "checking.py"), args.number, args.check]
        return subprocess.run(words).returncode
    script = str(FOLDER / f"exercise_{args.number.replace('.', '_')}.py")
    commands = [["-m", "jobkit", *shlex.split(text)] for text in COMMANDS.get(args.number, ())]
    for words in commands or [[script]]:
        if commands:
            print(f"$ jobkit {shlex.join(words[2:])}", flush=True)
        if subprocess.run([sys.executable, *words]).returncode:
            return Exit.FAILED
    print(f"the answer: docs/exercises/{exercises[args.number][1].name}")
    return Exit.OK
