"""The options of sbatch for runs on a site: pure, no command is called here."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jobkit.errors import UsageError, has_control
from jobkit.launch.command import LaunchRequest
from jobkit.launch.site import Site, minutes
from jobkit.launch.slurm_cluster import max_array_size
from jobkit.launch.start import WARNING_S
from jobkit.spec.command import PlannedRun
from jobkit.spec.study import Plan

Options = dict[str, str | bool]

# Options of run_benchmarks.py that sbatch knows by the same name.
OVERRIDES: dict[str, tuple[str | None, str]] = {
    "partition": ("-p", "partition in which the jobs run"),
    "account": ("-A", "account to charge"),
    "qos": ("-q", "quality of service"),
    "time": ("-t", "time limit of one run, as 30 (minutes) or 01:30:00"),
    "constraint": ("-C", "required node features"),
    "reservation": (None, "reservation to use"),
    "nodelist": ("-w", "required nodes"),
    "exclude": ("-x", "excluded nodes"),
    "mem": (None, "memory per node"),
    "gres": (None, "request for GPUs in place of the site's, as gpu:4"),
    "gpus-per-task": (None, "request for GPUs in place of the site's, as 1"),
    "cpus-per-task": ("-c", "cores per rank"),
    "begin": (None, "earliest start time"),
    "comment": (None, "job comment"),
    "dependency": ("-d", "dependency on other jobs, as sbatch takes it"),
    "mail-type": (None, "events to send mail for"),
    "mail-user": (None, "recipient of the mail"),
}
GPU_OPTIONS = {"gres", "gpus", "gpus-per-node", "gpus-per-task"}  # each asks for GPUs
_SET_BY_JOBKIT = ("nodes", "ntasks", "ntasks-per-node", "array", "output", "error", "job-name")
_WARNED_FROM_MIN = 5
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Shape:
    """The size of an allocation. All elements of an array have the same."""

    nodes: int
    ranks_per_node: int
    whole_node: bool = False  # a process drives all GPUs of its node

    def named(self, name: str) -> str:
        """A job's name with the size, as ddp-n1-g2."""
        return f"{name}-n{self.nodes}-g{self.ranks_per_node}"


@dataclass(frozen=True)
class Batch:
    """Runs of one shape, submitted as one array; as several where the cluster takes fewer."""

    run_ids: tuple[str, ...]
    options: Options
    at_once: int | None = None  # concurrent elements of the array
    whole: bool = False  # all runs in one allocation, one after the other

    @property
    def node_hours(self) -> float:
        """Node-hours of the jobs if each uses its whole time limit."""
        hours = minutes(str(self.options["time"])) / 60 * int(str(self.options["nodes"]))
        return hours * (1 if self.whole else len(self.run_ids))


def make_batches(
    plan: Plan, run_ids: Sequence[str], site: Site, request: LaunchRequest
) -> list[Batch]:
    """What is submitted, the same for a dry run and a real launch, the small shapes first.

    Raises UsageError for a run with more ranks per node than the site has GPUs.
    """
    whole, shapes = request.within_allocation, dict[Shape, list[str]]()
    for run_id in run_ids:
        shapes.setdefault(shape_of(plan.runs[run_id]), []).append(run_id)
    if whole:
        most = (max(getattr(shape, name) for shape in shapes) for name in Shape.__annotations__)
        shapes = {Shape(*most): list(run_ids)}
    batches, limit = [], len(run_ids) if whole else max_array_size()
    for shape in sorted(shapes, key=lambda s: (s.nodes * s.ranks_per_node, s.nodes)):
        runs = shapes[shape]
        name = plan.study.name if whole else _job_name(plan, runs, shape)
        options = sbatch_options(shape, site, request.options, name)
        if whole:  # a limit, the site's or --time, is for one run
            options["time"] = str(math.ceil(minutes(str(options["time"])) * len(run_ids)))
        options |= warning(options)
        for begin in range(0, len(runs), limit):
            part = tuple(runs[begin : begin + limit])
            batches.append(Batch(part, options, None if whole else request.at_once, whole))
    return batches


def shape_of(spec: PlannedRun) -> Shape:
    return Shape(spec.nodes, spec.ranks_per_node, spec.whole_node)


def _job_name(plan: Plan, run_ids: Sequence[str], shape: Shape) -> str:
    """What squeue shows of an array: its program or strategy, else the study, and its size."""
    names = {str(plan.runs[run_id].columns()["strategy"]) for run_id in run_ids}
    return shape.named(names.pop() if len(names) == 1 else plan.study.name)


def job_names(plan: Plan) -> set[str]:
    """The names that a job of this plan may have."""
    study, shapes = plan.study.name, {shape_of(spec) for spec in plan.runs.values()}
    names = {_job_name(plan, [run_id], shape_of(spec)) for run_id, spec in plan.runs.items()}
    return {study, *names, *(shape.named(study) for shape in shapes)}


def sbatch_options(shape: Shape, site: Site, overrides: Options, name: str) -> Options:
    """All options of one sbatch call: the site's, overridden by the user's."""
    if site.gpus_per_node and shape.ranks_per_node > site.gpus_per_node:
        what = f"{shape.ranks_per_node} GPUs on a node: site '{site.name}' has {site.gpus_per_node}"
        size = f"--gpus {shape.nodes * shape.ranks_per_node} with --gpus-per-node"
        raise UsageError(f"{what}; use more nodes, as {size} {site.gpus_per_node}")
    options: Options = {"job-name": name, "nodes": str(shape.nodes)}
    options |= {"ntasks-per-node": str(shape.ranks_per_node), "time": site.time}
    for key in ("partition", "account", "qos", "constraint", "reservation", "mem", "cpus_per_task"):
        if value := getattr(site, key):
            options[key.replace("_", "-")] = str(value)
    if site.exclusive:
        options["exclusive"] = True
    if site.gpus_per_node and site.gpu_request != "none" and not GPU_OPTIONS & overrides.keys():
        # One GPU per rank, or for dp all GPUs of the node.
        gpus = site.gpus_per_node if shape.whole_node else shape.ranks_per_node
        words = [*(["gpu"] if site.gpu_request == "gres" else []), site.gpu_type, str(gpus)]
        options[site.gpu_request] = ":".join(filter(None, words))
    options |= verbatim(site.sbatch)
    options |= overrides
    for key, value in options.items():
        if isinstance(value, str) and has_control(value):
            raise UsageError(f"--{key} {value!r}: has a control character")
    minutes(str(options["time"]))
    return options


def warning(options: Options) -> Options:
    """The options for a signal before the time limit and for requeueing, where the user gave none.

    A limit of a few minutes leaves no time: Slurm may send the signal a minute early, which could
    be at the start. submitit always asks for a signal; CONT does nothing.
    """
    short = minutes(str(options["time"])) < _WARNED_FROM_MIN
    more: Options = {"signal": "CONT@1" if short else f"USR2@{WARNING_S}"}
    more |= {} if "no-requeue" in options else {"requeue": True}
    return {key: value for key, value in more.items() if key not in options}


def verbatim(words: Sequence[str]) -> Options:
    """Options of sbatch from a site or --sbatch: --key=value, --key value, or --flag.

    Raises UsageError for a word that is no option, or an option that jobkit sets itself.
    """
    options, waiting = Options(), list(words)
    while waiting:
        word = waiting.pop(0)
        match = _OPTION.fullmatch(word)
        if not match:
            raise UsageError(f"'{word}': write options of sbatch in their long form, --key=value")
        key, value = match.groups()
        if key in (*_SET_BY_JOBKIT, "wrap"):
            raise UsageError(f"--{key}: jobkit sets this itself, from --gpus and --name")
        if value is None and waiting and not waiting[0].startswith("-"):
            value = waiting.pop(0)
        options[key] = True if value is None else value
    return options
