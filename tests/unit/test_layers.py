"""Who may import whom, and that each layer works without the others' libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "jobkit"
LIBRARIES = {
    "payload": {"torch", "torchvision", "PIL"},  # Pillow comes with torchvision
    "launch": {"submitit", "rich"},
    "analysis": {"pandas", "numpy", "matplotlib", "jinja2", "orjson", "rich"},
    "minicluster": set(),
}
PACKAGES = sorted(p.parent.name for p in SOURCE.glob("*/__init__.py"))
CORE = {p.stem for p in SOURCE.glob("*.py")} - {"__init__", "__main__"}
# What the payload needs of the core, and so runs on the oldest Python of an image.
OF_PAYLOAD = {
    *("metric", "comm", "plan", "paths", "errors", "dataset"),
    *("spec", "spec_options", "setting", "rhythm", "window"),
}


def imports(path: Path, source: str | None = None) -> set[str]:
    """The modules that a file imports, anywhere in it, as dotted names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source if source is not None else path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: say the whole name of what is imported"
            module = node.module or ""
            names |= {f"{module}.{a.name}" if module == "jobkit" else module for a in node.names}
    return names


def strangers(path: Path, package: str | None, source: str | None = None) -> list[str]:
    """The imports of a file that its layer may not have."""
    wrong = []
    for name in imports(path, source):
        first, _, rest = name.partition(".")
        own = rest.split(".")[0]
        if first == "jobkit":
            fine = own in CORE or own in ("", package) or own.startswith("__")
        else:
            fine = first in sys.stdlib_module_names or first in LIBRARIES.get(package or "", set())
        if not fine:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("name", sorted(CORE))
def test_the_core_imports_the_standard_library_and_itself_only(name: str) -> None:
    assert not strangers(SOURCE / f"{name}.py", None)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_layer_imports_the_core_and_its_own_libraries_only(package: str) -> None:
    assert package in LIBRARIES, f"say in this test which libraries {package} may have"
    files = sorted((SOURCE / package).rglob("*.py"))
    assert {f: w for f in files if (w := strangers(f, package))} == {}


@pytest.mark.parametrize(
    ("package", "source", "wrong"),
    [
        (None, "def f():\n    import torch", "torch"),
        (None, "from jobkit.payload import main", "jobkit.payload"),
        ("launch", "from jobkit import analysis", "jobkit.analysis"),
        ("analysis", "import submitit.core", "submitit.core"),
        ("payload", "import numpy as np", "numpy"),
    ],
)
def test_the_rule_sees_a_wrong_import(package: str | None, source: str, wrong: str) -> None:
    assert strangers(Path("x.py"), package, source) == [wrong]


def test_the_core_imports_of_the_payload_are_those_listed() -> None:
    used: set[str] = set()
    new = set().union(*(imports(f) for f in (SOURCE / "payload").rglob("*.py")))
    while new:
        core = {n.split(".")[1] for n in new if n.startswith("jobkit.")} & CORE
        new = set().union(*(imports(SOURCE / f"{n}.py") for n in core - used), set())
        used |= core
    assert used <= OF_PAYLOAD


@pytest.mark.parametrize(
    "path",
    [
        *sorted((SOURCE / "payload").rglob("*.py")),
        *(SOURCE / f"{n}.py" for n in sorted(OF_PAYLOAD)),
    ],
    ids=lambda p: str(p.relative_to(SOURCE)),
)
def test_the_payload_is_python_3_10(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    late = {"tomllib"}  # the library of 3.11; plan.py imports it where only the login node goes
    at_top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {a.name for n in at_top if isinstance(n, ast.Import) for a in n.names}
    names |= {
        f"{n.module}.{a.name}" for n in at_top if isinstance(n, ast.ImportFrom) for a in n.names
    }
    assert not names & (
        late | {"enum.StrEnum", "datetime.UTC", "typing.Self", "typing.assert_never"}
    )


def imports_without(modules: list[str], blocked: list[str]) -> subprocess.CompletedProcess[str]:
    """Import modules in a fresh Python in which others cannot be imported."""
    program = (
        "import sys, importlib\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted(m for m in sys.modules if m in {blocked!r} and sys.modules[m]))\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def modules_of(package: str) -> list[str]:
    """All modules of a package but its __main__, which would run."""
    files = sorted((SOURCE / package).rglob("*.py"))
    dotted = [".".join(("jobkit", *f.relative_to(SOURCE).with_suffix("").parts)) for f in files]
    return [d.removesuffix(".__init__") for d in dotted if not d.endswith("__main__")]


def test_the_payload_imports_without_the_login_nodes_libraries() -> None:
    others = ["submitit", "pandas", "matplotlib", "rich", "jinja2", "pytest", "jobkit.launch"]
    done = imports_without(modules_of("payload"), others)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "payload"])
def test_the_other_layers_import_without_torch(package: str) -> None:
    done = imports_without(modules_of(package), ["torch", "torchvision", "jobkit.payload"])
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_checking_settings_and_help_import_no_torch() -> None:
    program = (
        "import sys\nfrom jobkit.payload.main import main\n"
        "code = main(['--check', '--dataset', 'synthetic'])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
