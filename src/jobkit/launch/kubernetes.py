"""`run_benchmarks.py --to kubernetes`: one manifest per run, from the text of hpc/kubernetes.yaml.

Sources: the API of batch/v1 (kubernetes.io/docs/concepts/workloads/controllers/job), Kueue's queue
label (kueue.sigs.k8s.io). What the API server refuses is for `kubectl apply --dry-run=server`; here
only that is refused which it would take for something else.
"""

import hashlib
import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jobkit.errors import Exit, UsageError
from jobkit.files import read_text
from jobkit.launch.command import LaunchRequest, leave_spec, refuse_logs, run_words
from jobkit.launch.start import MAX_RESTARTS
from jobkit.paths import REPOSITORY, write_whole
from jobkit.spec.command import PlannedRun
from jobkit.spec.settings import check_fields, setting
from jobkit.spec.study import Plan

TEMPLATE = REPOSITORY / "hpc" / "kubernetes.yaml"
PORT = 29500
MOUNT = "/runs"  # where the template mounts the volume
MAX_NAME = 50  # of a Job: its controller adds the pod's index
# run.sh ends what is left of the ranks this long before the container is killed.
_LAST_S = 15
_MIN_GRACE_S = 30
_GRACE = re.compile(r"^ *terminationGracePeriodSeconds: (\d{1,9}) *(?:#.*)?$", re.MULTILINE)
# The pods wait so long for each other: images are pulled, and a pod that failed is started again
# up to 6 minutes later. A node that has waited in vain ends with 1, which the Job counts.
_START_S = 900


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The options of --to kubernetes. Raises UsageError, naming the option, for a bad value."""

    image: str = setting("", "container image with jobkit and torch")
    queue: str = setting("", "local queue of Kueue")
    template: str = setting("", "file to fill in in place of hpc/kubernetes.yaml")
    gpu_resource: str = setting("nvidia.com/gpu", "resource of which a pod gets one per rank; "
                                "none: without GPUs")  # fmt: skip
    resource: tuple[str, ...] = setting((), "more resources of a pod, as cpu=16 or rdma/hca=1")
    toleration: tuple[str, ...] = setting((), "taints that the pods tolerate, as "
                                          "dedicated=gpu:NoSchedule or nvidia.com/gpu")  # fmt: skip
    annotation: tuple[str, ...] = setting((), "annotations of the pods, as KEY=VALUE")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.image:
            raise UsageError("--to kubernetes needs --image, as registry.example.org/jobkit:1.0")
        for name in ("resource", "annotation"):
            for word in getattr(self, name):
                if "=" not in word[1:]:
                    raise UsageError(f"--{name} '{word}': must be as KEY=VALUE")
        if "memory" in pairs(self.resource):
            raise UsageError("--resource memory: it stands in hpc/kubernetes.yaml (see --template)")

    def tolerations(self) -> list[dict[str, str]]:
        entries = []
        for word in self.toleration:
            taint, _, effect = word.partition(":")
            key, equals, value = taint.partition("=")
            how = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
            entries.append({"key": key, **how, **({"effect": effect} if effect else {})})
        return entries


def add_kubernetes_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Kubernetes", "Only with --to kubernetes.")
    group.add_argument(
        "--to",
        choices=("kubernetes",),
        help="write one manifest per run into the study's folder, and start nothing",
    )
    for field in fields(KubernetesOptions):
        many: dict[str, Any] = {"nargs": "+", "action": "extend"} if field.default == () else {}
        default = f" (default {field.default})" if field.default else ""
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=f"k8s_{field.name}",
            metavar="X",
            help=field.metadata["help"] + default,
            **many,
        )


def kubernetes_options(args: Namespace) -> KubernetesOptions | None:
    """The options, or None without --to. Raises UsageError for a bad value, or one without it."""
    names = [field.name for field in fields(KubernetesOptions)]
    values = {n: v for n in names if (v := getattr(args, f"k8s_{n}")) is not None}
    if values and not args.to:
        option = next(iter(values)).replace("_", "-")
        raise UsageError(f"--{option} is for --to kubernetes: add that, or leave it out")
    return KubernetesOptions(**values) if args.to else None


def object_name(study: str, run_id: str) -> str:
    """A name that every object and pod of the run may have: a DNS label, unique by the run."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{study}-{run_id}".lower()).strip("-")
    if len(name) <= MAX_NAME and name[:1].isalpha():
        return name
    mark = hashlib.sha256(f"{study}/{run_id}".encode()).hexdigest()[:8]
    return f"r-{name[: MAX_NAME - 11].strip('-')}-{mark}"


def read_template(path: str | Path) -> str:
    """The text of a template, without the lines that are for who edits it. Raises UsageError."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise UsageError(f"--template {path}: cannot be read: {why}") from None
    return "".join(f"{line}\n" for line in lines if not line.lstrip().startswith("##"))


def manifest(
    template: str, name: str, run_dir: str, spec: PlannedRun, options: KubernetesOptions,
    restarts: int,
) -> str:  # fmt: skip
    """The YAML of one run: a Job, and before it the Service of one with several pods.

    name: of its objects. run_dir: its folder, relative to the volume. restarts: of all its pods
    together, after a failure. Raises UsageError for a template that cannot be filled in.
    """
    several, folder = spec.nodes > 1, f"{MOUNT}/{run_dir}"
    grace = _GRACE.search(template)
    if not grace or int(grace[1]) < _MIN_GRACE_S:
        line = f"terminationGracePeriodSeconds: N, {_MIN_GRACE_S} or more"
        raise UsageError(f"--template {options.template}: needs the line {line}")
    args = ["--nproc-per-node", str(spec.ranks_per_node)]
    if several:
        args += ["--nnodes", str(spec.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
        args += ["--master-addr", f"{name}-0.{name}", "--master-port", str(PORT)]
        args += ["--start-timeout", str(_START_S)]
    args += ["--shutdown-timeout", str(int(grace[1]) - _LAST_S), "--run-dir", folder]
    # The kubelet expands $(NAME), so that a user's own is written as $$(NAME).
    args += [word.replace("$(", "$$(") for word in run_words(spec, folder)]
    limits = pairs(options.resource)
    if options.gpu_resource != "none" and spec.device != "cpu":
        limits = {options.gpu_resource: str(spec.ranks_per_node), **limits}
    values = {
        "NAME": as_yaml(name),
        "PORT": str(PORT),
        "QUEUE": as_yaml(options.queue),
        "NODES": str(spec.nodes),
        "BACKOFF": str(restarts * spec.nodes),
        "ANNOTATIONS": as_yaml(pairs(options.annotation)),
        "SUBDOMAIN": as_yaml(name if several else ""),
        "TOLERATIONS": as_yaml(options.tolerations()),
        "IMAGE": as_yaml(options.image),
        "ARGS": as_yaml(args),
        "LIMITS": f", {as_yaml(limits)[1:-1]}" if limits else "",
    }
    for word in re.findall("@([A-Z]+)", template):
        if word not in values:
            known = ", ".join(f"@{name}" for name in values)
            raise UsageError(f"--template {options.template}: unknown @{word} (known: {known})")
    if not several:  # nobody looks for its pod
        parts = template.split("---\n")
        template = "---\n".join(part for part in parts if "\nkind: Service\n" not in part)
    unset = tuple(f"@{name}\n" for name, value in values.items() if not value)
    kept = (line for line in template.splitlines(keepends=True) if not line.endswith(unset))
    return "".join(re.sub("@([A-Z]+)", lambda match: values[match[1]], line) for line in kept)


def as_yaml(value: Any) -> str:
    """A value as JSON, which YAML reads, with escapes for all that YAML would not print.

    Nothing where it is empty.
    """
    text = json.dumps(value, ensure_ascii=False) if value else ""
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def pairs(words: Sequence[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def to_kubernetes(
    plan: Plan, options: KubernetesOptions, request: LaunchRequest, dry_run: bool
) -> int:
    """Write the plan and the manifest of each run, or print them all; return the exit code."""
    refused = {
        "--site": request.site,
        "an option of Slurm": request.options or request.within_allocation or request.gpu_request,
        "--max-running": request.at_once,
    }
    for option in (name for name, value in refused.items() if value):
        raise UsageError(f"{option}: has no effect with --to kubernetes, leave it out")
    refuse_logs(plan.paths)
    plan = plan.continued()
    restarts = MAX_RESTARTS if request.max_restarts is None else request.max_restarts
    template, texts = read_template(options.template or TEMPLATE), {}
    for run_id, spec in plan.runs.items():
        if spec.nodes > 1 and getattr(spec, "launcher", None) == "once":
            what = f"--launcher once on {spec.nodes} nodes: it starts the command in one pod only"
            raise UsageError(f"{what}: take srun or torchrun, or sizes of one node")
        if options.gpu_resource != "none" and spec.whole_node:
            # Its pod would get one GPU, of all that it is to drive.
            what = "dp drives all GPUs of a node, of which --to kubernetes knows no number"
            raise UsageError(f"{what}: leave it out of --strategies")
        name, on_volume = object_name(plan.study.name, run_id), f"{plan.paths.folder.name}/{run_id}"
        texts[run_id] = manifest(template, name, on_volume, spec, options, restarts)
    if dry_run:
        print("---\n".join(texts.values()), end="")
        return Exit.OK
    plan.save()
    folder = plan.paths.folder / "kubernetes"
    folder.mkdir(exist_ok=True)
    for run_id, yaml in texts.items():
        leave_spec(plan.paths.run(run_id), plan.runs[run_id])
        write_whole(folder / f"{run_id}.yaml", yaml)
    for note in plan.notes:
        print(f"note: {note}")
    print(f"{len(texts)} manifests in {folder}/: nothing was started", flush=True)
    more = "(docs/kubernetes.md: the volume, and what comes back)"
    print(f"next: kubectl apply -f {folder}/    {more}")
    return Exit.OK
