"""Who may import whom, at any depth: so each room, a folder, works without others' libraries."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator

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
    "drill": (*CORE, "outcome", "launch", "minicluster"),
    "analysis": (*CORE, "outcome", "program"),
    "export": (*CORE, "payload"),
    "minicluster": ("ground",),
}
LIBRARIES = {
    "spec": {"yaml"},  # if it is there, for settings in YAML
    "payload": {"torch", "torchvision", "PIL"},  # Pillow comes with torchvision
    "planner": {"torch"},
    "checks": {"torch"},
    "launch": {"submitit", "rich", "yaml"},
    "drill": {"rich"},
    "analysis": {"pandas", "numpy", "matplotlib", "jinja2", "orjson", "regex", "rich"},
    "export": {"torch", "onnxruntime"},
}
# Inside analysis: each folder may import those before it. "" is its own files.
ORDER = ("tables", "scaling", "collect", "findings", "figures", "report", "")
# Rooms that a vendor's image runs: the syntax and library of its Python.
OF_IMAGES = ("program", "ground", "spec", "metric", "payload", "planner", "checks")
# What run.sh becomes, on a batch host with an older Python.
ON_ANY_HOST = {f"jobkit.launch.{name}" for name in ("supervise", "start", "together")}


FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


def room_of(module: str) -> str:
    first, *rest = module.split(".")
    if first != "jobkit":
        return first
    return rest[0] if rest and rest[0] in MAY_IMPORT else "ground"


def folder_of(module: str) -> str:
    rest = module.split(".")[2:]
    return rest[0] if rest and (len(rest) > 1 or FILES[module].name == "__init__.py") else ""


def imports(module: str) -> Iterator[str]:
    """The modules that a file imports, inside functions too, as dotted names."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # The hook loads program under another name; elsewhere the whole name is said.
            assert node.level == (room_of(module) == "program" and node.level), module
            below = "jobkit.program" + (f".{node.module}" if node.module else "")
            base = below if node.level else str(node.module)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in FILES else base


def is_allowed(module: str, name: str) -> bool:
    """Whether a module's room may have this import."""
    room, first = room_of(module), name.split(".")[0]
    if first not in ("jobkit", "minicluster"):
        return first in sys.stdlib_module_names or first in LIBRARIES.get(room, ())
    if room_of(name) != room:
        return room_of(name) in MAY_IMPORT[room]
    if room != "analysis" or name not in FILES:
        return True
    return ORDER.index(folder_of(name)) <= ORDER.index(folder_of(module))


def too_new(module: str) -> list[str]:
    """What Python 3.10 has not: its syntax is parsed, its library looked up."""
    late = {"tomllib", "enum.StrEnum", "datetime.UTC", "typing.Self", "typing.assert_never"}
    try:
        tree = ast.parse(FILES[module].read_text(), feature_version=(3, 10))
    except SyntaxError as error:
        return [str(error)]
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    # Of 3.10 these modules have a TimeoutError of their own, which the builtin one is not.
    if {"asyncio", "concurrent.futures"} & names:
        late.add("TimeoutError")
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= used & {"TimeoutError"}
    return sorted(names & late)


def test_each_room_imports_what_it_may() -> None:
    """The rooms below it, its own libraries; no circles; in an image the Python of 3.10."""
    folders = {p.name for p in (SOURCE / "jobkit").iterdir() if (p / "__init__.py").exists()}
    assert folders | {"ground", "minicluster"} == set(MAY_IMPORT)
    # A login node needs no torch: no room without it may import one with it, at any depth.
    with_torch = {room for room, names in LIBRARIES.items() if "torch" in names}
    assert not [r for r in MAY_IMPORT.keys() - with_torch if with_torch & {*MAY_IMPORT[r]}]
    edges = {m: {n for n in imports(m) if n in FILES and n != m} for m in FILES}
    graphlib.TopologicalSorter(edges).prepare()  # fails where there is a circle
    found = {m: w for m in FILES if (w := [n for n in imports(m) if not is_allowed(m, n)])}
    of_images = [m for m in FILES if room_of(m) in OF_IMAGES or m in ON_ANY_HOST]
    found |= {m: w for m in of_images if (w := too_new(m))}
    assert found == {}


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
