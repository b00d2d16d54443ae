"""`python -m jobkit meter`: the meter as one file, for an image without jobkit."""

import ast
from collections.abc import Sequence
from pathlib import Path

import jobkit.program
from jobkit.errors import Parser

# Each needs those before it.
PARTS = ("lines", "process", "machine", "why", "windows", "meter")


def source() -> str:
    """The text of the file: the docstring of the meter, all imports, the parts' code."""
    imports, bodies, head = set[str](), [], ""
    for name in PARTS:
        text = Path(jobkit.program.__path__[0], f"{name}.py").read_text(encoding="utf-8")
        docstring, *rest = ast.parse(text).body
        nodes = [node for node in rest if isinstance(node, (ast.Import, ast.ImportFrom))]
        imports |= {ast.unparse(n) for n in nodes if not getattr(n, "level", 0)}
        lines = text.splitlines(keepends=True)
        head = "".join(lines[: docstring.end_lineno])
        bodies.append("".join(lines[nodes[-1].end_lineno :]).strip("\n"))
    return "\n\n\n".join(["\n".join([head, *sorted(imports)]), *bodies]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the file."""
    parser = Parser(
        prog="jobkit meter",
        description="Print the meter as one file (standard library, Python 3.10), for an image.",
        epilog="example: python -m jobkit meter > meter.py",
    )
    parser.parse_args(argv)
    print(source(), end="")
    return 0
