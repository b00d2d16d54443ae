"""Who may import whom, at any depth: so each room, a folder, works without others' libraries."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Iterator

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
    "data": CORE,
    "payload": (*CORE, "program", "data"),
    "planner": (*CORE, "payload"),
    "checks": (*CORE, "program", "data", "payload", "planner"),
    "launch": (*CORE, "outcome"),
    "drill": (*CORE, "outcome", "launch", "minicluster"),
    "analysis": (*CORE, "outcome", "program"),
    "export": (*CORE, "payload"),
    "minicluster": ("ground",),
}
LIBRARIES = {
    "spec": {"yaml"},  # if it is there, for settings in YAML
    "data": {"torch", "torchvision", "PIL"},  # Pillow comes with torchvision
    "payload": {"torch", "torchvision"},
    "planner": {"torch"},
    "checks": {"torch", "yaml"},
    "launch": {"submitit", "rich"},
    "drill": {"pandas", "rich"},
    "analysis": {"pandas", "numpy", "matplotlib", "jinja2", "orjson", "rich"},
    "export": {"torch", "onnxruntime"},
}
# Inside analysis: each folder may import those before it. "" is its own files.
ORDER = ("tables", "scaling", "collect", "findings", "figures", "report", "")
# Rooms that a vendor's image runs, with its Python; and what run.sh becomes on a batch host.
OF_IMAGES = ("program", "ground", "spec", "metric", "data", "payload", "planner", "checks")
ON_ANY_HOST = {f"jobkit.launch.{name}" for name in ("supervise", "start", "command", "together")}
TOO_NEW = {"tomllib", "enum.StrEnum", "datetime.UTC", "typing.Self", "typing.assert_never"}

FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


def room_of(module: str) -> str:
    first, *rest = module.split(".")
    if first != "jobkit":
        return first
    return rest[0] if rest and rest[0] in MAY_IMPORT else "ground"


def folder_of(module: str) -> int:
    """The place in ORDER of a module of analysis."""
    rest = module.split(".")[2:]
    whole = len(rest) > 1 or FILES[module].name == "__init__.py"
    return ORDER.index(rest[0] if rest and whole else "")


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What these statements import, as dotted names; a name of a module after the module's."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Only in program: the hook loads it under another name.
            base = ".".join(["jobkit.program"] * node.level + [node.module or ""]).strip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_allowed(module: str, name: str) -> bool:
    """Whether a module's room may have this import."""
    room, first = room_of(module), name.split(".")[0]
    if first not in ("jobkit", "minicluster"):
        return first in sys.stdlib_module_names or first in LIBRARIES.get(room, ())
    if room_of(name) != room:
        return room_of(name) in MAY_IMPORT[room]
    return room != "analysis" or name not in FILES or folder_of(name) <= folder_of(module)


def test_each_room_imports_what_it_may() -> None:
    """The rooms below it, its own libraries; no circles; in an image the Python of 3.10."""
    folders = {p.name for p in (SOURCE / "jobkit").iterdir() if (p / "__init__.py").exists()}
    assert folders | {"ground", "minicluster"} == set(MAY_IMPORT)
    # A login node needs no torch: no room without it may import one with it, at any depth.
    with_torch = {room for room, names in LIBRARIES.items() if "torch" in names}
    assert not [r for r in MAY_IMPORT.keys() - with_torch if with_torch & {*MAY_IMPORT[r]}]
    edges, wrong = {}, []
    for module, path in FILES.items():
        of_images = room_of(module) in OF_IMAGES or module in ON_ANY_HOST
        tree = ast.parse(path.read_text(), feature_version=(3, 10) if of_images else None)
        names = {n if n in FILES else n.rpartition(".")[0] or n for n in imports(ast.walk(tree))}
        edges[module] = names & {*FILES} - {module}
        new = TOO_NEW & {*imports(tree.body)} if of_images else set()
        wrong += [(module, n) for n in names if not is_allowed(module, n)] + [*new]
    graphlib.TopologicalSorter(edges).prepare()  # fails where there is a circle
    assert wrong == []


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
