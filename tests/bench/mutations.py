"""Do the tests see what they are there for? Each row of mutations.toml breaks one line of a copy.

    python tests/bench/mutations.py                      all, two at a time; some minutes
    python tests/bench/mutations.py --only quoting       those whose name or file has this text
    python tests/bench/mutations.py --check              only whether every row still applies

A mutation is caught where the tests of its row, of those that `make test` runs, fail; first all
these tests must pass without one. Prints a table; ends with 4 where less than 95 % are caught.
"""

import argparse
import ast
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutations.toml")
SHARE, LIMIT_S = 0.95, 180
_times = itertools.count(int(time.time()) + 10, 2)


@dataclass(frozen=True)
class Mutation:
    """One change of a file, and the tests that should see it."""

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]

    def fault(self) -> str:
        """Why it cannot be applied; empty where it can."""
        path = ROOT / self.file
        text = path.read_text() if path.exists() else ""
        if (found := text.count(self.old)) != 1 or self.old == self.new:
            return f"its old text is found {found} times in {self.file}"
        if path.suffix == ".py":
            try:
                ast.parse(text.replace(self.old, self.new))
            except SyntaxError as error:
                return f"it is no Python: {error}"
        absent = [t for t in self.tests if not (ROOT / t.partition("::")[0]).exists()]
        return f"there is no {', '.join(absent)}" if absent or not self.tests else ""


class Copy:
    """The working tree in a folder, with a Python that has our packages and the copy's source."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        venv.create(folder / ".venv", symlinks=True)
        (own,) = (folder / ".venv").glob("lib/python*/site-packages")
        installed = next(p for p in sys.path if Path(p).name == "site-packages")
        (own / "copy.pth").write_text(f"{folder / 'src'}\n{installed}\n")

    def write(self, file: str, text: str) -> None:
        """Replace a file, later each time: Python takes compiled code by the time of its source."""
        path = self.folder / file
        path.write_text(text)
        os.utime(path, times=(moment := next(_times), moment))

    def test(self, tests: Sequence[str], limit_s: float) -> int | None:
        """The exit code of pytest; None where the time was up."""
        words = [self.folder / ".venv/bin/python", "-m", "pytest", "-x", "-q", "-m", "not long"]
        process = subprocess.Popen(
            [*words, "-p", "no:cacheprovider", *tests], cwd=self.folder, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            self.said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        return process.returncode

    def mutate(self, one: Mutation) -> int | None:
        """What pytest says of the copy with this mutation."""
        text = (ROOT / one.file).read_text()
        self.write(one.file, text.replace(one.old, one.new))
        try:
            return self.test(one.tests, LIMIT_S)
        finally:
            self.write(one.file, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="of names and files")
    parser.add_argument("--check", action="store_true", help="apply none")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    rows = tomllib.loads(TABLE.read_text())["mutation"]
    mutations = [m for m in (Mutation(**r) for r in rows) if args.only in f"{m.name} {m.file}"]
    faults = [f"{m.name}: {fault}" for m in mutations if (fault := m.fault())]
    if faults or args.check or not mutations:
        print(*faults, f"{len(mutations)} mutations, {len(faults)} do not apply", sep="\n")
        return 2 if faults or not mutations else 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        free: SimpleQueue[Copy] = SimpleQueue()
        for number in range(args.jobs):
            free.put(copy := Copy(Path(name, str(number))))
        tests = {test for one in mutations for test in one.tests}
        if copy.test(
            [t for t in tests if "::" not in t or t.partition("::")[0] not in tests], 3600
        ):
            print(copy.said, "the tests fail without any mutation", sep="\n")
            return 2

        def judge(one: Mutation) -> bool:
            taken, begun = free.get(), time.monotonic()
            code = taken.mutate(one)
            verdict = {0: "SURVIVED", 1: "caught", None: "caught, as it hangs"}.get(code)
            verdict = verdict or f"ERROR {taken.said}"
            free.put(taken)
            print(f"{time.monotonic() - begun:6.1f} s  {verdict:10} {one.name}", flush=True)
            return verdict.startswith("caught")

        with ThreadPoolExecutor(args.jobs) as pool:
            caught = sum(pool.map(judge, mutations))
    print(f"{caught} of {len(mutations)} caught, {caught / len(mutations):.1%}")
    return 0 if caught >= SHARE * len(mutations) else 4


if __name__ == "__main__":
    sys.exit(main())
