"""`python -m jobkit` (or `jobkit`): the commands, each the entry of one part of jobkit."""

import sys
from collections.abc import Sequence

from jobkit import __version__, entry

# What a person wants: {name: (module, function, what it does)}. A call imports its module alone.
GROUPS = {
    "use: measure how a training scales": {
        "prepare": ("jobkit.data.prepare", "main", "download or convert a dataset"),
        "run": ("jobkit.launch.cli", "main", "run a study (the same as run_benchmarks.py)"),
        "status": ("jobkit.launch.status", "main", "state and progress of a study's runs"),
        "cancel": ("jobkit.launch.cancel", "main", "cancel the runs of a study"),
        "collect": ("jobkit.analysis.cli", "collect_main", "logs to CSV (collect_results.py)"),
        "plot": ("jobkit.analysis.cli", "plot_main", "CSV to figures (plot_results.py)"),
        "compare": ("jobkit.analysis.compare", "main", "which sizes of two studies differ"),
        "comm": ("jobkit.checks.comm", "main", "measure collective latency and bandwidth"),
        "export": ("jobkit.export.cli", "main", "export a trained model: C++, ONNX, PyTorch"),
    },
    "check: before it costs node-hours": {
        "preflight": ("jobkit.checks.preflight.cli", "main", "an allocation, before a job uses it"),
        "verify": ("jobkit.checks.verify.cli", "main", "every strategy against one process"),
        "drill": ("jobkit.drill.cli", "main", "faults in a training, and its recovery"),
        "check-k8s": ("jobkit.checks.check_k8s", "main", "manifests for Kubernetes"),
        "check-claims": ("jobkit.checks.claims", "main", "a text's claims, by its figures"),
    },
    "learn: plan and understand": {
        "memory": ("jobkit.planner.memory", "main", "predict the memory of each strategy"),
        "advise": ("jobkit.planner.advise", "main", "recommend a strategy, with reasons"),
    },
}
COMMANDS = {name: row for group in GROUPS.values() for name, row in group.items()}


def usage() -> str:
    """The list of commands."""
    lines = ["usage: python -m jobkit COMMAND [options]", ""]
    lines += ["Measure how a training job scales on a cluster, with confidence intervals."]
    for title, group in GROUPS.items():
        lines += ["", title]
        lines += [f"  {name:<13} {text}" for name, (_, _, text) in group.items()]
    lines += [
        "",
        "examples:",
        "  python -m jobkit prepare --dataset cifar10",
        "  python -m jobkit status demo --watch",
        "",
        "'python -m jobkit COMMAND --help' says more; --version says the version, --prefix",
        "the folder of run.sh, hpc/ and edf.toml.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the remaining arguments; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return entry.run(*COMMANDS[words[0]][:2], words[1:])
    return entry.call(_about, words)


def _about(words: Sequence[str]) -> int:
    """Answer what is no command; return the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--prefix":
        from jobkit.paths import REPOSITORY

        print(REPOSITORY)
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
