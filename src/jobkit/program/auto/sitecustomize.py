"""Start-up hook: measures any Python program that trains with torch, unchanged.

Python imports sitecustomize at its start. With JOBKIT_AUTO set (not 0) this one waits for torch's
optimizers and loaders to be imported, and then loads ../hook.py, which measures them. The user's
own sitecustomize is run as if this one were not there. A program without torch pays for one look
into a set per import.
"""

import importlib.machinery
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load(name: str, spec: Any) -> Any:
    """The module of a spec, loaded under a name."""
    import importlib.util

    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _hook() -> Any:
    """The module that measures: from its folder as a package, as jobkit need not be installed."""
    import importlib.util

    if "jobkit_auto" not in sys.modules:
        path = os.path.join(os.path.dirname(_HERE), "__init__.py")
        _load("jobkit_auto", importlib.util.spec_from_file_location("jobkit_auto", path))
    return importlib.import_module("jobkit_auto.hook")


class _Finder:
    """Finds two modules of torch as the other finders do, and has each measured once loaded."""

    def __init__(self) -> None:
        self.names = {"torch.optim.optimizer", "torch.utils.data.dataloader"}
        self.environment = dict(os.environ)  # the program may clear its own

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.names:
            return None
        import importlib.util

        self.names.discard(name)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            try:
                _hook().attach(module, self.environment)
            except Exception as error:
                print(f"jobkit: not measured: {error!r}", file=sys.__stderr__)

        spec.loader.exec_module = exec_module
        return spec


def _run_next() -> None:
    """Run the sitecustomize that this one hides, where there is one."""
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec and spec.loader:
        _load("sitecustomize", spec)


if __name__ == "sitecustomize":
    if os.environ.get("JOBKIT_AUTO", "0") not in ("", "0"):
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints its own start
        sys.meta_path.insert(0, _Finder())
    _run_next()
