"""Exercises in distributed training: `python -m jobkit exercise`.

Each is a script in docs/exercises, which measures something on this machine; the chapters beside it
have the questions and the answers. Five have a file to complete, and a check that runs it.
"""

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
# Number: title, chapter, and the commands of jobkit where it has no script of its own.
EXERCISES: dict[str, tuple[str, str, Sequence[str]]] = {
    "1.1": ("shapes and batch sizes", "1-model", ()),
    "2.1": ("the process group", "2-setup", ()),
    "3.1": ("the data of each rank", "3-data", ()),
    "4.1": ("DDP: what is replicated", "4-strategies", ()),
    "4.2": ("FSDP and mixed precision", "4-strategies", ()),
    "4.3": ("DDP against FSDP", "4-strategies", ()),
    "5.1": ("the whole program", "5-program", ()),
    "6.1": ("training and validation", "6-training", ()),
    "6.2": ("DDP and FSDP train", "6-training", [f"{_STUDY}exercise-6 --gpus 2"]),
    "7.1": ("a small study", "7-scaling", [f"{_STUDY}exercise-7 --gpus 1 2", "collect exercise-7"]),
    "7.2": ("its figures and sentences", "7-scaling", ["plot exercise-7"]),
}
EPILOG = """examples:
  python -m jobkit exercise                                  list them
  python -m jobkit exercise 3.1                              measure
  python -m jobkit exercise 4.1 --skeleton my_ddp.py         write the file to complete
  python -m jobkit exercise 4.1 --check my_ddp.py            check it on two ranks

exit codes: 0 ok; 1 it could not be measured; 2 wrong usage; 4 the check found something wrong
"""


def skeleton_of(number: str) -> Path:
    """The file to complete; it is there for the exercises that have one."""
    return FOLDER / "skeletons" / f"{number}.txt"


def script_of(number: str, kind: str = "exercise") -> Path:
    """The script that measures, or the one that checks."""
    return FOLDER / f"{kind}_{number.replace('.', '_')}.py"


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
    if args.number is None:
        if args.skeleton or args.check:
            raise UsageError("which exercise? as: python -m jobkit exercise 4.1 --check FILE")
        print("exercises (docs/exercises has the questions):")
        for number, (title, _, _) in EXERCISES.items():
            more = "; a file to complete" if skeleton_of(number).exists() else ""
            print(f"  {number}  {title}{more}")
        print("\n'python -m jobkit exercise NUMBER' measures one")
        return Exit.OK
    one_of("exercise", args.number, EXERCISES)
    _, chapter, commands = EXERCISES[args.number]
    skeleton = skeleton_of(args.number)
    if (args.skeleton or args.check) and not skeleton.exists():
        known = ", ".join(number for number in EXERCISES if skeleton_of(number).exists())
        raise UsageError(f"exercise {args.number} has no file to complete (these do: {known})")
    if args.skeleton:
        try:
            with Path(args.skeleton).open("x", encoding="utf-8") as out:
                out.write(skeleton.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{args.skeleton}: {error.strerror}") from None
        check = f"'python -m jobkit exercise {args.number} --check {args.skeleton}'"
        print(f"{args.skeleton}: complete it, then {check}")
        return Exit.OK
    if args.check:
        if not Path(args.check).is_file():
            raise UsageError(f"{args.check}: no such file; --skeleton FILE writes one")
        words = [sys.executable, str(script_of(args.number, "check")), args.check]
        return subprocess.run(words).returncode
    for text in commands:
        print(f"$ jobkit {text}", flush=True)
        if subprocess.run([sys.executable, "-m", "jobkit", *shlex.split(text)]).returncode:
            return Exit.FAILED
    own = [sys.executable, str(script_of(args.number))]
    if not commands and subprocess.run(own).returncode:
        return Exit.FAILED
    print(f"the answer: docs/exercises/{chapter}.md")
    return Exit.OK
