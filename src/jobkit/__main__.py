"""`python -m jobkit` (or `jobkit`): the commands, each a door into one part of jobkit."""

import sys
from collections.abc import Sequence

from jobkit import __version__, door

# name: (module, function, what it does). A module is imported when its command is called.
COMMANDS = {
    "prepare": (
        "jobkit.payload.data.prepare",
        "main",
        "fetch or convert a dataset",
    ),
    "run": ("jobkit.launch.cli", "main", "run a study (the same as run_benchmarks.py)"),
    "status": ("jobkit.launch.follow.status", "main", "how far each run of a study is"),
    "cancel": ("jobkit.launch.cancel", "main", "end the runs of a study"),
    "drill": ("jobkit.drill.cli", "main", "plant faults in a training; what each costs"),
    "check-edf": ("jobkit.launch.edf.cli", "main", "check a container's environment file"),
    "verify": ("jobkit.checks.verify.cli", "main", "prove every strategy equal to one process"),
    "memory": ("jobkit.planner.memory", "main", "what each strategy takes in memory"),
    "advise": ("jobkit.planner.advise", "main", "which strategy to take, and why"),
    "preflight": ("jobkit.checks.preflight.cli", "main", "check an allocation before it is used"),
    "comm": ("jobkit.checks.comm.cli", "main", "measure the communication between the ranks"),
    "plot-comm": ("jobkit.analysis.figures.comm", "main", "figures of what comm measured"),
    "step-model": (
        "jobkit.analysis.findings.step_cli",
        "main",
        "predict step times, validate them",
    ),
    "collect": ("jobkit.analysis.cli", "collect_main", "logs to CSV (collect_results.py)"),
    "check-claims": ("jobkit.analysis.claims.cli", "main", "recompute somebody's scaling table"),
    "plot": ("jobkit.analysis.cli", "plot_main", "CSV to figures (plot_results.py)"),
}


def usage() -> str:
    """The list of commands."""
    lines = [f"  {name:<12} {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m jobkit COMMAND [options]",
            "",
            "Measure how a training job scales on a cluster, and tell the truth about it.",
            "",
            "commands:",
            *lines,
            "",
            "examples:",
            "  python -m jobkit prepare --dataset cifar10",
            "  python -m jobkit status demo --watch",
            "",
            "'python -m jobkit COMMAND --help' says more; --version says the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the rest of the line to the command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        module, function, _ = COMMANDS[words[0]]
        return door.run(module, function, words[1:])
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(f"jobkit {__version__}")
        return 0
    from jobkit.errors import Exit, nearest

    what = f"unknown command '{words[0]}'{nearest(words[0], COMMANDS)}"
    print(f"jobkit: error: {what} (see 'python -m jobkit --help')", file=sys.stderr)
    return Exit.USAGE


if __name__ == "__main__":
    # `python -m` looks for every module in the current folder first, which may be another user's.
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.exit(main())
