"""The common entry of the scripts (run_benchmarks.py, collect_results.py, ...).

Each of them is started by whatever `python` the user has. So the code here is readable by an old
Python too (no annotations, no f-strings), imports the standard library only, and reports in one
line what to do if the Python is too old or a package is not installed.
"""

# ruff: noqa: UP030, UP031, UP032
import importlib
import os
import sys

OLDEST = (3, 11)
# The extra of pyproject.toml that brings a package; what is not here comes with a plain install.
EXTRA_OF = {
    "torch": "payload",
    "torchvision": "payload",
    "pandas": "analysis",
    "numpy": "analysis",
    "matplotlib": "analysis",
    "jinja2": "analysis",
    "orjson": "analysis",
}
_IN_A_CHECKOUT = "run 'make venv' once, then 'source .venv/bin/activate'"
USAGE, INTERRUPTED = 2, 130  # as in jobkit.errors, which an old Python cannot read


def run(module, function, argv=None):
    # type: (str, str, list[str] | None) -> int
    """Import the module, call its function with the arguments, and return the exit code."""
    if sys.version_info < OLDEST:
        return _refuse(
            "Python {0}.{1} or newer is needed, and {2} is {3[0]}.{3[1]}: {4}".format(
                OLDEST[0], OLDEST[1], sys.executable, sys.version_info, _IN_A_CHECKOUT
            )
        )
    try:
        main = getattr(importlib.import_module(module), function)
        code = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return int(code)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "jobkit"):
            raise
        return _refuse(missing(package))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has exited (`... | head`), which is no error; Python must not
        # flush into the broken pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def missing(package):
    # type: (str) -> str
    """One line: the package is not installed, and the command that installs it."""
    from jobkit.paths import INSTALLED  # which an old Python cannot read

    what = "the package '{0}' is not installed for {1}".format(package, sys.executable)
    if not INSTALLED:
        return "{0}: {1}".format(what, _IN_A_CHECKOUT)
    # jobkit is there already, so that pip only adds what the extra names.
    extra = EXTRA_OF.get(package, "launch")
    return "{0}: run \"python -m pip install 'jobkit[{1}]'\"".format(what, extra)


def _refuse(what):
    # type: (str) -> int
    """Print in one line what is missing and what to do."""
    sys.stderr.write("jobkit: %s\n" % what)
    return USAGE
