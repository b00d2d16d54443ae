"""The meter as one file, to be copied to where jobkit is not installed."""

import ast
from pathlib import Path

# Each needs those before it.
PARTS = ("lines", "process", "counters", "sampling", "step_times", "windows", "stop", "meter")


def source() -> str:
    """The text of the file: the docstring of the meter, all imports, the parts' code."""
    folder, imports, bodies, head = Path(__file__).parent, set[str](), [], ""
    for name in PARTS:
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        docstring, *rest = ast.parse(text).body
        own = [node for node in rest if isinstance(node, (ast.Import, ast.ImportFrom))]
        imports |= {line for node in own if "jobkit" not in (line := ast.unparse(node))}
        lines = text.splitlines(keepends=True)
        head = "".join(lines[: docstring.end_lineno])
        bodies.append("".join(lines[own[-1].end_lineno :]).strip("\n"))
    return "\n\n\n".join(["\n".join([head, *sorted(imports)]), *bodies]) + "\n"
