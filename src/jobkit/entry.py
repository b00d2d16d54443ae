"""The common entry of every command: run_benchmarks.py, collect_results.py, `python -m jobkit`.

Each of them is started by whatever `python3` the user has. So the code here is readable by an old
one too (no f-strings), imports the standard library only, and reports in one line what to do if the
Python is too old or a package is not installed.
"""

# ruff: noqa: UP030, UP031, UP032
import importlib
import io
import select
import sys
import typing

OLDEST = (3, 11)
# What each extra of pyproject.toml brings; what is not here comes with a plain install.
EXTRAS = {
    "payload": ("torch", "torchvision"),
    "analysis": ("pandas", "numpy", "matplotlib", "jinja2", "orjson"),
    "kubernetes": ("yaml",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
}
_IN_A_CHECKOUT = "run 'make venv' once, then 'source .venv/bin/activate'"
FAILED, USAGE, INTERRUPTED = 1, 2, 130  # as in jobkit.errors, which an old Python cannot read


def run(module: str, function: str, argv: "list[str] | None" = None) -> int:
    """Import the module, call its function with the arguments, and return the exit code."""
    if sys.version_info < OLDEST:
        return _refuse(
            "Python {0}.{1} or newer is needed, and {2} is {3[0]}.{3[1]}: {4}".format(
                OLDEST[0], OLDEST[1], sys.executable, sys.version_info, _IN_A_CHECKOUT
            )
        )
    return call(lambda words: getattr(importlib.import_module(module), function)(words), argv)


def call(main: "typing.Callable[[list[str]], int]", argv: "list[str] | None" = None) -> int:
    """Call a main function, and return its exit code, or that of what ends it."""
    protect_output()
    try:
        return int(main(sys.argv[1:] if argv is None else argv))
    except SystemExit as end:  # of argparse: --help, or wrong usage
        return int(end.code or 0)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "jobkit"):
            raise
        return _refuse(missing(package))
    except KeyboardInterrupt:
        return INTERRUPTED
    except MemoryError:
        return _refuse("error: out of memory (see ulimit -v)", FAILED)
    except OSError as error:  # the machine's, no fault of the program: a full disk, a stale handle
        where = "" if error.filename is None else "{0!r}: ".format(str(error.filename))
        return _refuse("error: {0}{1}".format(where, error.strerror or error), FAILED)


def missing(package: str) -> str:
    """One line: the package is not installed, and the command that installs it."""
    from jobkit.paths import INSTALLED  # which an old Python cannot read

    what = "the package '{0}' is not installed for {1}".format(package, sys.executable)
    if not INSTALLED:
        return "{0}: {1}".format(what, _IN_A_CHECKOUT)
    # A path: on the package index another project is called jobkit.
    extra = next((extra for extra, names in EXTRAS.items() if package in names), "launch")
    advice = "run \"python -m pip install '/path/to/jobkit[{0}]'\", of a checkout or a wheel"
    return "{0}: {1}".format(what, advice.format(extra))


def _refuse(what: str, code: int = USAGE) -> int:
    """Print in one line what is wrong; return the exit code."""
    sys.stderr.write("jobkit: %s\n" % what)
    return code


class _Lossy(io.FileIO):
    """A file handle to write to; after an error all output to it is dropped, and the work goes on.

    A reader leaves (`... | head`), or a terminal closes.
    """

    lost = False

    def write(self, data: "typing.Any") -> int:
        """Write some of the data, or drop all of it; return how many bytes were taken."""
        try:
            while not self.lost:
                taken = super().write(data)
                if taken is not None:
                    return taken
                select.select([], [self], [])  # another program made the terminal non-blocking
        except OSError:
            self.lost = True
        return len(data)


def protect_output() -> None:
    """Let no error of output or encoding end this process.

    Streams that were replaced before (a test's, a notebook's) or closed (>&-) are left as they are.
    """
    for handle, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, "__%s__" % name) or stream.closed:
            continue
        protected = io.TextIOWrapper(
            io.BufferedWriter(_Lossy(handle, "wb", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",  # a path may have bytes, and text letters, not to be shown
            line_buffering=stream.line_buffering,
            write_through=handle == 2,
        )
        stream.flush()
        setattr(sys, name, protected)
