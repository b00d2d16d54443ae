"""Who may import whom, at any depth, and that each room works without the others' libraries.

Rooms are folders. Each names the rooms below it that it may import; inside payload and analysis
the folders stand one on the other as well.
"""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from jobkit.program.single import PARTS
from support.place import ROOT

SOURCE = ROOT / "src"
CORE = ("ground", "spec", "metric")
# Room: the rooms that its files may import, beside their own. "ground" is jobkit/*.py.
MAY_IMPORT = {
    "program": (),
    "ground": ("program",),
    "spec": ("ground",),
    "metric": ("ground", "program"),
    "outcome": CORE,
    "payload": (*CORE, "program"),
    "planner": (*CORE, "payload"),
    "checks": (*CORE, "payload", "planner"),
    "launch": (*CORE, "outcome"),
    "drill": (*CORE, "outcome", "launch"),
    "analysis": (*CORE, "outcome"),
    "exercise": (*CORE, "payload", "planner", "outcome", "analysis"),
    "export": (*CORE, "payload"),
    "minicluster": (),
}
# Each is imported only by name, by a program that has its library.
ADAPTERS = {f"jobkit.program.{name}" for name in ("lightning", "transformers", "accelerate")}
LIBRARIES = {
    "program": {"lightning", "transformers", "accelerate"},
    "spec": {"yaml"},  # if it is there, for settings in YAML
    "payload": {"torch", "torchvision", "PIL"},  # Pillow comes with torchvision
    "planner": {"torch"},
    "checks": {"torch"},
    "launch": {"submitit", "rich", "yaml"},
    "drill": {"rich"},
    "analysis": {
        "pandas",
        "numpy",
        "matplotlib",
        "jinja2",
        "orjson",
        "regex",
        "rich",
        "markdown_it",
    },
    "exercise": {"torch"},
    "export": {"torch", "onnxruntime"},
}
# Inside a room: each folder may import those before it. "" is the room's own files, which in
# payload stand both below the folders and above them.
ORDER = {
    "payload": ("data", "strategies", "measure", "checkpoints", "guard"),
    "analysis": (
        *("tables", "scaling", "collect", "claims", "compare", "findings", "figures", "report", ""),
    ),
}
# Rooms that a vendor's image runs: the syntax and library of its Python.
OF_IMAGES = ("program", "ground", "spec", "metric", "payload", "planner", "checks")
NOT_OF_IMAGES = {"jobkit.spec.studies"}  # read on a login node


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def room_of(module: str) -> str:
    """The room of a module of the project."""
    first, *rest = module.split(".")
    if first != "jobkit":
        return first
    return rest[0] if rest and rest[0] in MAY_IMPORT else "ground"


def folder_of(module: str) -> str:
    """The folder inside its room, "" for the room's own files."""
    rest = module.split(".")[2:]
    return rest[0] if rest and (len(rest) > 1 or FILES[module].name == "__init__.py") else ""


def imports(module: str, source: str | None = None, top: bool = False) -> Iterator[str]:
    """The modules that a file imports, as dotted names; top: without those inside functions."""
    tree = ast.parse(source if source is not None else FILES[module].read_text())
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: say the whole name of what is imported"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in FILES else str(node.module)


def strangers(module: str, source: str | None = None) -> list[str]:
    """The imports of a module that its room may not have."""
    room, wrong = room_of(module), []
    for name in imports(module, source):
        first = name.split(".")[0]
        if first in ("jobkit", "minicluster"):
            fine = room_of(name) in (room, *MAY_IMPORT[room]) and climbs(module, name) is None
        else:
            fine = first in sys.stdlib_module_names or first in LIBRARIES.get(room, set())
        if not fine:
            wrong.append(name)
    return wrong


def climbs(module: str, name: str) -> str | None:
    """Why an import goes up between the folders of a room; None where it does not."""
    room = room_of(module)
    order = ORDER.get(room, ())
    if room_of(name) != room or name not in FILES:
        return None
    here, there = folder_of(module), folder_of(name)
    if here == there or here not in order or there not in order:
        return None
    return None if order.index(there) < order.index(here) else f"{here} imports {there}"


def circle_from(start: str, edges: dict[str, set[str]]) -> list[str]:
    """The modules on a way of imports from a module back to itself; empty where there is none."""
    seen, todo = set(), [[start]]
    while todo:
        way = todo.pop()
        for name in edges[way[-1]]:
            if name == start:
                return way
            if name not in seen:
                seen.add(name)
                todo.append([*way, name])
    return []


def too_new(module: str) -> list[str]:
    """What Python 3.10 has not: its syntax is parsed, its library looked up."""
    late = {"tomllib", "enum.StrEnum", "datetime.UTC", "typing.Self", "typing.assert_never"}
    try:
        tree = ast.parse(FILES[module].read_text(), feature_version=(3, 10))
    except SyntaxError as error:
        return [str(error)]
    names = set(imports(module, top=True))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    # Of 3.10 these modules have a TimeoutError of their own, which the builtin one is not.
    caught = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {"TimeoutError"}
    return sorted(names & late) + sorted(
        caught if {"asyncio", "concurrent.futures"} & names else ()
    )


def test_each_room_imports_what_it_may() -> None:
    """The rooms below it, its own libraries; no circles; in an image the Python of 3.10."""
    folders = {p.name for p in (SOURCE / "jobkit").iterdir() if (p / "__init__.py").exists()}
    assert folders | {"ground", "minicluster"} == set(MAY_IMPORT)
    edges = {m: {n for n in imports(m) if n in FILES and n != m} for m in FILES}
    found = {m: w for m in FILES if (w := strangers(m) + circle_from(m, edges))}
    of_images = [m for m in FILES if room_of(m) in OF_IMAGES and m not in NOT_OF_IMAGES]
    found |= {m: w for m in of_images if (w := too_new(m))}
    parts = {f"jobkit.program.{name}" for name in PARTS}  # of the meter, which is one file
    for name in parts:
        others = {n for n in imports(name) if n.split(".")[0] not in sys.stdlib_module_names}
        found |= {name: sorted(others - parts)} if others - parts else {}
    assert found == {}


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("jobkit.errors", "def f():\n    import torch", "torch"),
        ("jobkit.paths", "from jobkit.payload import main", "jobkit.payload.main"),
        ("jobkit.metric.line", "from jobkit.spec.plan import Plan", "jobkit.spec.plan"),
        ("jobkit.launch.cli", "from jobkit import analysis", "jobkit.analysis"),
        ("jobkit.launch.slurm.submit", "import jobkit.payload.main", "jobkit.payload.main"),
        ("jobkit.analysis.cli", "import submitit.core", "submitit.core"),
        ("jobkit.payload.data.cache", "import numpy as np", "numpy"),
        ("jobkit.planner.memory", "from jobkit.checks import compare", "jobkit.checks.compare"),
        ("minicluster.cli", "from jobkit.errors import Exit", "jobkit.errors"),
        (
            "jobkit.analysis.scaling.fits",
            "from jobkit.analysis.figures import draw",
            "jobkit.analysis.figures.draw",
        ),
    ],
)
def test_the_rule_sees_a_wrong_import(module: str, source: str, wrong: str) -> None:
    assert strangers(module, source) == [wrong]


def imports_without(rooms: Collection[str], blocked: Collection[str]) -> None:
    """Import all modules of rooms in a fresh Python in which others cannot be imported.

    Not __main__, which would run, nor those that need the library of a program.
    """
    own = [m for m in FILES if room_of(m) in rooms and m not in ADAPTERS]
    own = [m for m in own if not m.endswith("__main__")]
    program = (
        "import sys, importlib\n"
        f"for name in {sorted(blocked)!r}: sys.modules[name] = None\n"
        f"for name in {own!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_runs_in_an_image_imports_without_the_login_nodes_libraries() -> None:
    """The rooms that every rank has; of those with torch the rule above reads the source."""
    others = {"submitit", "pandas", "matplotlib", "rich", "jinja2", "orjson", "pytest"}
    others |= {"jobkit.launch", "jobkit.analysis", "jobkit.outcome", "jobkit.drill"}
    imports_without({"program", "ground", "spec", "metric"}, {*others, "torch"})


def test_a_login_node_needs_no_torch_and_a_launch_no_pandas() -> None:
    """Nor does a run's analysis need the launcher."""
    with_torch = {room for room, names in LIBRARIES.items() if "torch" in names}
    torch = {"torch", "torchvision", "jobkit.payload"}
    imports_without(MAY_IMPORT.keys() - with_torch - {"analysis"}, torch | {"pandas", "matplotlib"})
    imports_without({"analysis"}, torch | {"submitit", "jobkit.launch"})


def test_help_and_checks_of_settings_import_no_library() -> None:
    heavy = {"torch", "torchvision", "numpy", "pandas", "matplotlib", "submitit", "rich", "jinja2"}
    program = (
        "import contextlib, importlib, io, sys\n"
        "from jobkit.__main__ import COMMANDS\n"
        "from jobkit.payload.main import main\n"
        "for name, (module, function, *_) in COMMANDS.items():\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        getattr(importlib.import_module(module), function)(['--help'])\n"
        f"    assert not {heavy!r} & set(sys.modules), name\n"
        "assert not main(['--check', '--dataset', 'synthetic'])\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
