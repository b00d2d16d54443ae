"""`run_benchmarks.py --to kubernetes`: one manifest per run, from a template of text.

Sources: the API of batch/v1 (kubernetes.io/docs/concepts/workloads/controllers/job), Kueue's queue
label (kueue.sigs.k8s.io). What the API server refuses is for `kubectl apply --dry-run=server`; here
only that is refused which it would take for something else.
"""

import hashlib
import json
import re
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, fields
from typing import Any

from jobkit.errors import Exit, UsageError
from jobkit.launch.command import LaunchRequest, leave_spec, refuse_logs, run_words
from jobkit.launch.start import MAX_RESTARTS
from jobkit.paths import write_whole
from jobkit.spec.command import PlannedRun
from jobkit.spec.settings import check_fields, setting
from jobkit.spec.study import Plan

PORT = 29500
MOUNT = "/runs"  # where the pods have the volume
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MAX_NAME = 50  # of a Job: its controller adds the pod's index
# run.sh ends what is left of the ranks this long before the container is killed.
_LAST_S = 15
# The pods wait so long for each other: images are pulled, and a pod that failed is started again
# up to 6 minutes later. A node that has waited in vain ends with 1, which the Job counts.
_START_S = 900


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The options of --to kubernetes. Raises UsageError, naming the option, for a bad value."""

    image: str = setting("", "container image with jobkit and torch")
    queue: str = setting("", "local queue of Kueue")
    volume_claim: str = setting("jobkit-runs", "PersistentVolumeClaim for the runs, which all "
                                "pods mount")  # fmt: skip
    gpu_resource: str = setting("nvidia.com/gpu", "resource of which a pod gets one per rank; "
                                "none: without GPUs")  # fmt: skip
    pod_memory: str = setting("64Gi", "memory of a pod, its /dev/shm included")
    shm_size: str = setting("8Gi", "size of /dev/shm, which counts as memory of the pod")
    grace_s: int = setting(120, "seconds from SIGTERM to SIGKILL", low=30)
    user_id: int = setting(1000, "user and group id of the processes", low=1)
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

    def tolerations(self) -> list[dict[str, str]]:
        """The pods' tolerations."""
        entries = []
        for word in self.toleration:
            taint, _, effect = word.partition(":")
            key, equals, value = taint.partition("=")
            how = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
            entries.append({"key": key, **how, **({"effect": effect} if effect else {})})
        return entries


def add_kubernetes_arguments(parser: ArgumentParser) -> None:
    """Add --to and the options of Kubernetes."""
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
            type=int if isinstance(field.default, int) else str,
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


# The headless Service gives the pods their names, also before they are ready.
SERVICE = f"""\
apiVersion: v1
kind: Service
metadata: {{name: @NAME, labels: {{app.kubernetes.io/name: jobkit}}}}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{batch.kubernetes.io/job-name: @NAME}}
  ports: [{{name: rendezvous, port: {PORT}}}]
---
"""
# `exec`, so that run.sh is the container's first process and gets its signals.
JOB = f"""\
apiVersion: batch/v1
kind: Job
metadata:
  name: @NAME
  labels: @LABELS
spec:
  completionMode: Indexed
  completions: @NODES
  parallelism: @NODES
  # A run whose pod fails loses all of its pods, and each of them counts.
  backoffLimit: @BACKOFF
  # Else two pods may run the same index for a while.
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
    # Wrong usage: another start would not mend it.
    - action: FailJob
      onExitCodes: {{containerName: train, operator: In, values: [{int(Exit.USAGE)}]}}
    # Stopped early with a checkpoint, or evicted: starts again, and does not count.
    - action: Ignore
      onExitCodes: {{containerName: train, operator: In, values: [{int(Exit.AGAIN)}]}}
    - action: Ignore
      onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
  template:
    metadata:
      annotations: @ANNOTATIONS
    spec:
      subdomain: @SUBDOMAIN
      restartPolicy: Never
      terminationGracePeriodSeconds: @GRACE
      automountServiceAccountToken: false
      enableServiceLinks: false
      tolerations: @TOLERATIONS
      securityContext:
        runAsNonRoot: true
        runAsUser: @USER
        runAsGroup: @USER
        fsGroup: @USER
        seccompProfile: {{type: RuntimeDefault}}
      containers:
      - name: train
        image: @IMAGE
        command: [bash, -c, 'exec bash "$(python -m jobkit --prefix)/run.sh" "$@"', run.sh]
        args: @ARGS
        env: @ENV
        resources: @RESOURCES
        securityContext:
          allowPrivilegeEscalation: false
          capabilities: {{drop: [ALL]}}
        volumeMounts:
        - {{name: shm, mountPath: /dev/shm}}
        - {{name: runs, mountPath: {MOUNT}}}
      volumes:
      - name: shm
        emptyDir: {{medium: Memory, sizeLimit: @SHM}}
      - name: runs
        persistentVolumeClaim: {{claimName: @CLAIM}}
"""


def object_name(study: str, run_id: str) -> str:
    """A name that every object and pod of the run may have: a DNS label, unique by the run."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{study}-{run_id}".lower()).strip("-")
    if len(name) <= MAX_NAME and name[:1].isalpha():
        return name
    mark = hashlib.sha256(f"{study}/{run_id}".encode()).hexdigest()[:8]
    return f"r-{name[: MAX_NAME - 11].strip('-')}-{mark}"


def manifest(
    name: str, run_dir: str, spec: PlannedRun, options: KubernetesOptions, restarts: int
) -> str:
    """The YAML of one run: a Job, and before it the Service of one with several pods.

    name: of its objects. run_dir: its folder, relative to the volume. restarts: of all its pods
    together, after a failure.
    """
    several, folder = spec.nodes > 1, f"{MOUNT}/{run_dir}"
    labels = {"app.kubernetes.io/name": "jobkit"}
    labels |= {QUEUE_LABEL: options.queue} if options.queue else {}
    args = ["--nproc-per-node", str(spec.ranks_per_node)]
    if several:
        args += ["--nnodes", str(spec.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
        args += ["--master-addr", f"{name}-0.{name}", "--master-port", str(PORT)]
        args += ["--start-timeout", str(_START_S)]
    args += ["--shutdown-timeout", str(options.grace_s - _LAST_S), "--run-dir", folder]
    # The kubelet expands $(NAME), so that a user's own is written as $$(NAME).
    args += [word.replace("$(", "$$(") for word in run_words(spec, folder)]
    # The user has no entry in the image's /etc/passwd, and no home. JOBKIT_POD: an end by TERM is
    # an eviction, and the exit code tells of the checkpoint.
    env = {"HOME": "/tmp", "USER": "jobkit", "JOBKIT_LOGS": MOUNT}
    env |= {"JOBKIT_DATA_DIR": f"{MOUNT}/jobkit-data", "JOBKIT_POD": "1"}
    limits = {"memory": options.pod_memory}
    if options.gpu_resource != "none" and spec.device != "cpu":
        limits[options.gpu_resource] = str(spec.ranks_per_node)
    limits |= dict(word.split("=", 1) for word in options.resource)
    values = {
        "NAME": name,
        "LABELS": labels,
        "NODES": spec.nodes,
        "BACKOFF": restarts * spec.nodes,
        "ANNOTATIONS": dict(word.split("=", 1) for word in options.annotation) or None,
        "SUBDOMAIN": name if several else None,
        "GRACE": options.grace_s,
        "TOLERATIONS": options.tolerations() or None,
        "USER": options.user_id,
        "IMAGE": options.image,
        "ARGS": args,
        "ENV": [{"name": key, "value": value} for key, value in env.items()],
        "RESOURCES": {"requests": {"memory": options.pod_memory}, "limits": limits},
        "SHM": options.shm_size,
        "CLAIM": options.volume_claim,
    }

    def as_yaml(match: re.Match[str]) -> str:
        """A value as JSON, which YAML reads, with escapes for all that YAML would not print."""
        text = json.dumps(values[match[1]], ensure_ascii=False)
        return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)

    lines = ((SERVICE if several else "") + JOB).splitlines(keepends=True)
    unset = [f"@{name}\n" for name, value in values.items() if value is None]  # they end a line
    kept = (line for line in lines if not line.endswith(tuple(unset)))
    return "".join(re.sub("@([A-Z]+)", as_yaml, line) for line in kept)


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
    texts = {}
    for run_id, spec in plan.runs.items():
        if spec.nodes > 1 and getattr(spec, "launcher", None) == "once":
            take = "take srun or torchrun, or sizes of one node"
            what = f"--launcher once on {spec.nodes} nodes: it starts the command in one pod only"
            raise UsageError(f"{what}: {take}")
        if options.gpu_resource != "none" and spec.whole_node:
            # Its pod would get one GPU, of all that it is to drive.
            what = "dp drives all GPUs of a node, of which --to kubernetes knows no number"
            raise UsageError(f"{what}: leave it out of --strategies")
        name, on_volume = object_name(plan.study.name, run_id), f"{plan.paths.folder.name}/{run_id}"
        texts[run_id] = manifest(name, on_volume, spec, options, restarts)
    if dry_run:
        print("---\n".join(texts.values()), end="")
        return Exit.OK
    plan.save()
    folder = plan.paths.folder / "kubernetes"
    folder.mkdir(exist_ok=True)
    for run_id, yaml in texts.items():
        leave_spec(plan.paths, run_id, plan.runs[run_id])
        write_whole(folder / f"{run_id}.yaml", yaml)
    for note in plan.notes:
        print(f"note: {note}")
    print(f"{len(texts)} manifests in {folder}/: nothing was started", flush=True)
    more = "(docs/kubernetes.md: the volume, and what comes back)"
    print(f"next: kubectl apply -f {folder}/    {more}")
    return Exit.OK
