"""Puts the top level's files into the wheel; all else of the build is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FILES = ("run.sh", "run_benchmarks.py", "collect_results.py", "plot_results.py", "plot_results.sh")
PATTERNS = (*FILES, "edf.toml", "hpc/*.sh", "hpc/*.bash", "hpc/*.yaml", "hpc/minicluster")
PATTERNS += ("hpc/sites/*.toml", "hpc/studies/*.toml", "hpc/patterns/*.toml")
PATTERNS += ("hpc/inference/infer.cpp", "hpc/inference/CMakeLists.txt")
PATTERNS += ("docs/exercises/*.py", "docs/exercises/*.md", "docs/exercises/*.toml")
PATTERNS += ("docs/exercises/skeletons/*.txt",)
INSTALLED = Path("jobkit", "_kit")  # as jobkit.paths knows it

# In the checkout src/ holds the packages and nothing else, so that it can be put on PYTHONPATH for
# another Python, as a container's. site-packages cannot: that Python would import all of it. So
# the wheel has a src/ whose packages are those that are installed.
PACKAGE = '''"""The installed package, on a path where it has no neighbours."""

from pathlib import Path

_installed = Path(__file__).resolve().parents[4] / __name__
__path__ = [str(_installed)]
exec((_installed / "__init__.py").read_text(encoding="utf-8"))
'''


class BuildWithTopLevel(build_py):
    """Builds the packages, and a copy of the top level within jobkit."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout itself is used
            return
        for source, target in self._copies().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)  # with its mode: some are called by their names
        for shim in self._packages():
            shim.parent.mkdir(parents=True, exist_ok=True)
            shim.write_text(PACKAGE, encoding="utf-8")

    def get_source_files(self) -> list[str]:
        """What an sdist needs for a wheel."""
        return [*super().get_source_files(), *self._copies()]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """What the build leaves."""
        made = super().get_outputs(include_bytecode)
        if self.editable_mode:
            return made
        return [*made, *map(str, self._copies().values()), *map(str, self._packages())]

    def _copies(self) -> dict[str, Path]:
        top = Path(self.build_lib) / INSTALLED
        found = [path for pattern in PATTERNS for path in sorted(Path().glob(pattern))]
        return {str(path): top / path for path in found}

    def _packages(self) -> list[Path]:
        top = Path(self.build_lib) / INSTALLED / "src"
        return [top / name / "__init__.py" for name in self.packages if "." not in name]


setup(cmdclass={"build_py": BuildWithTopLevel})
