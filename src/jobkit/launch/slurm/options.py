"""From runs and a site to sbatch's options: pure, no command is called here."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobkit.errors import UsageError
from jobkit.launch.request import How
from jobkit.launch.site import Site, minutes
from jobkit.paths import StudyPaths
from jobkit.requeue import WARNING_S
from jobkit.spec.plan import Plan
from jobkit.spec.runspec import RunSpec

Options = dict[str, str | bool]

# Options of run_benchmarks.py that sbatch knows by the same name.
OVERRIDES: dict[str, tuple[str | None, str]] = {
    "partition": ("-p", "partition"),
    "account": ("-A", "account that pays"),
    "qos": ("-q", "quality of service"),
    "time": ("-t", "limit of one run, as 30 (minutes) or 01:30:00"),
    "constraint": ("-C", "features that nodes must have"),
    "reservation": (None, "reservation"),
    "nodelist": ("-w", "nodes that must be used"),
    "exclude": ("-x", "nodes that must not be used"),
    "mem": (None, "memory on each node"),
    "cpus-per-task": ("-c", "cores of a rank"),
    "begin": (None, "not before this time"),
    "comment": (None, "a comment"),
    "dependency": ("-d", "wait for other jobs"),
    "mail-type": (None, "events to be told of by mail"),
    "mail-user": (None, "who is told"),
}
_OWN = ("nodes", "ntasks", "ntasks-per-node", "array", "output", "error", "job-name", "wrap")
_WARNED_FROM_MIN = 5
# A warning that is sent to all of a job is for the run, which hears it too: the shell must live on.
_SETUP = ["trap : USR1 USR2"]
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Shape:
    """A size of an allocation. One array has one shape: Slurm cannot vary it within."""

    nodes: int
    ranks_per_node: int


@dataclass(frozen=True)
class Batch:
    """Runs of one shape, submitted as one array."""

    shape: Shape
    run_ids: tuple[str, ...]
    options: Options


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What is to be submitted."""

    plan: Plan
    batches: Sequence[Batch]
    site: Site
    at_once: int | None = None  # elements of an array that may run at one time
    whole: bool = False  # all runs in one allocation, one after the other
    max_restarts: int | None = None  # of one job (None: run.sh's own default)

    @property
    def study(self) -> StudyPaths:
        return self.plan.paths


def submission(plan: Plan, run_ids: Sequence[str], site: Site, how: How) -> Submission:
    """What is submitted for the runs, the same for a dry run and the real one."""
    if how.within_allocation:
        shape = largest(plan, run_ids)
        options = sbatch_options(shape, site, how.options, plan.study.name)
        if "time" not in how.options:  # the site's limit is for one run
            options["time"] = str(math.ceil(minutes(site.time) * len(run_ids)))
        whole = [Batch(shape, tuple(run_ids), options)]
        options |= warning(options, _stop_signal(plan, run_ids))
        return Submission(
            plan=plan, batches=whole, site=site, whole=True, max_restarts=how.max_restarts
        )
    made = batches(plan, run_ids, site, how.options)
    return Submission(
        plan=plan, batches=made, site=site, at_once=how.at_once, max_restarts=how.max_restarts
    )


def shape_of(spec: RunSpec) -> Shape:
    """The allocation that a run needs."""
    return Shape(spec.nodes, spec.ranks_per_node)


def batches(plan: Plan, run_ids: Sequence[str], site: Site, given: Options) -> list[Batch]:
    """The runs by shape, the small shapes first, each with sbatch's options.

    Raises UsageError for a run with more ranks a node than the site has GPUs.
    """
    shapes: dict[Shape, list[str]] = {}
    for run_id in run_ids:
        shapes.setdefault(shape_of(plan.runs[run_id]), []).append(run_id)
    signal = _stop_signal(plan, run_ids)
    order = sorted(shapes, key=lambda s: (s.nodes * s.ranks_per_node, s.nodes))
    return [
        Batch(shape, tuple(shapes[shape]), options | warning(options, signal))
        for shape in order
        for options in [sbatch_options(shape, site, given, plan.study.name)]
    ]


def largest(plan: Plan, run_ids: Sequence[str]) -> Shape:
    """The smallest allocation in which each of the runs fits."""
    specs = [plan.runs[run_id] for run_id in run_ids]
    return Shape(max(s.nodes for s in specs), max(s.ranks_per_node for s in specs))


def sbatch_options(shape: Shape, site: Site, given: Options, name: str) -> Options:
    """All options of one sbatch call: the site's, then what the user gave, which wins."""
    if site.gpus_per_node and shape.ranks_per_node > site.gpus_per_node:
        raise UsageError(
            f"{shape.ranks_per_node} GPUs on a node: site '{site.name}' has {site.gpus_per_node}; "
            f"use more nodes, as --gpus {shape.nodes * shape.ranks_per_node} with "
            f"--gpus-per-node {site.gpus_per_node}"
        )
    options: Options = {
        "job-name": name,
        "nodes": str(shape.nodes),
        "ntasks-per-node": str(shape.ranks_per_node),
        "time": site.time,
    }
    for key in ("partition", "account", "qos", "constraint", "reservation", "mem"):
        if value := getattr(site, key):
            options[key] = value
    if site.cpus_per_task:
        options["cpus-per-task"] = str(site.cpus_per_task)
    if site.exclusive:
        options["exclusive"] = True
    options |= gpu_options(shape, site)
    options |= verbatim(site.sbatch)
    options |= given
    for key, value in options.items():
        if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f]", value):
            raise UsageError(f"--{key} {value!r}: has a control character")
    minutes(str(options["time"]))
    return options


def warning(options: Options, stop_signal: str) -> Options:
    """The options by which a job is warned before its limit, and may be requeued; not those given.

    A limit of a few minutes leaves no time: Slurm may warn a minute too early, which could be at
    the start. submitit sends some signal in any case; CONT does nothing.
    """
    short = minutes(str(options["time"])) < _WARNED_FROM_MIN
    found: Options = {"signal": "CONT@1" if short else f"{stop_signal}@{WARNING_S}"}
    if "no-requeue" not in options:
        found["requeue"] = True
    return {key: value for key, value in found.items() if key not in options}


def _stop_signal(plan: Plan, run_ids: Sequence[str]) -> str:
    """The signal on which the runs save and end. Raises UsageError where they differ in it."""
    signals = {plan.runs[run_id].stop_signal for run_id in run_ids}
    if len(signals) > 1:
        raise UsageError("stop_signal: must be the same for all runs of a study")
    return next(iter(signals))


def gpu_options(shape: Shape, site: Site) -> Options:
    """How the site wants to be asked for GPUs, one a rank."""
    if not site.gpus_per_node or site.gpu_request == "none":
        return {}
    kind = f"{site.gpu_type}:" if site.gpu_type else ""
    if site.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{shape.ranks_per_node}"}
    if site.gpu_request == "gpus-per-task":
        return {"gpus-per-task": f"{kind}1"}
    return {"gpus-per-node": f"{kind}{shape.ranks_per_node}"}


def verbatim(words: Sequence[str]) -> Options:
    """Options of sbatch as a user typed them after `--`: --key=value, --key value, or --flag.

    Raises UsageError for a word that is none, or an option that jobkit itself decides.
    """
    options: Options = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        match = _OPTION.fullmatch(word)
        if not match:
            raise UsageError(f"'{word}': write options of sbatch in their long form, --key=value")
        key, value = match[1], match[2]
        if key in _OWN:
            raise UsageError(f"--{key}: jobkit sets this itself, from --gpus and --name")
        if value is None and waiting and not waiting[0].startswith("-"):
            value = waiting.pop(0)
        options[key] = True if value is None else value
    return options


def node_hours(wanted: Submission) -> float:
    """Node-hours of all jobs if each takes its whole time limit."""
    return sum(
        _node_hours(b.options, 1 if wanted.whole else len(b.run_ids)) for b in wanted.batches
    )


def _node_hours(options: Options, jobs: int) -> float:
    return jobs * int(str(options["nodes"])) * minutes(str(options["time"])) / 60


def submitit_parameters(options: Options, at_once: int | None) -> dict[str, Any]:
    """The options in the form in which submitit writes them into its script.

    All go in as additional parameters: as its own, nodes and tasks would have submitit wait for
    a result from every task. Its defaults that do not fit are overridden or left out.
    """
    more = dict(options)
    return {
        "job_name": more.pop("job-name"),
        "additional_parameters": more,
        "use_srun": False,
        "wckey": None,
        "array_parallelism": at_once or 1000,
        "stderr_to_stdout": True,
        "setup": _SETUP,
    }
