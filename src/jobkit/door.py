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
USAGE, INTERRUPTED = 2, 130  # as in jobkit.errors, which an old Python cannot read


def run(module, function, argv=None):
    # type: (str, str, list[str] | None) -> int
    """Import the module, call its function with the arguments, and return the exit code."""
    if sys.version_info < OLDEST:
        return _refuse(
            "Python {0}.{1} or newer is needed, and {2} is {3[0]}.{3[1]}".format(
                OLDEST[0], OLDEST[1], sys.executable, sys.version_info
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
        return _refuse("the package '{0}' is not installed for {1}".format(package, sys.executable))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has exited (`... | head`), which is no error; Python must not
        # flush into the broken pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _refuse(what):
    # type: (str) -> int
    """Print in one line what is missing and what to do."""
    sys.stderr.write("jobkit: %s: run 'make venv' once, then 'source .venv/bin/activate'\n" % what)
    return USAGE
