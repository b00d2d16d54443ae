"""A run of a plan as a Job of Kubernetes: a template of text, and what is filled in.

Sources: the API of batch/v1 (kubernetes.io/docs/concepts/workloads/controllers/job), Kueue's queue
label (kueue.sigs.k8s.io).
"""

import hashlib
import json
import re
from typing import Any

from jobkit.errors import Exit
from jobkit.launch.command import run_words
from jobkit.launch.kubernetes.options import KubernetesOptions
from jobkit.spec.runspec import PlannedRun

PORT = 29500
MOUNT = "/runs"  # where the pods have the volume
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MAX_NAME = 50  # of a Job: its controller adds the pod's index
# run.sh ends what is left of the ranks this long before the container is killed.
_LAST_S = 15
# The pods wait so long for each other: images are pulled, and a pod that failed is started again
# up to 6 minutes later. A node that has waited in vain ends with 1, which the Job counts.
_START_S = 900

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
    name: str,
    run_dir: str,
    spec: PlannedRun,
    options: KubernetesOptions,
    restarts: int,
    energy: str = "",
) -> str:
    """The YAML of one run: a Job, and before it the Service of one with several pods.

    name: of its objects. run_dir: its folder, relative to the volume. restarts: of all its pods
    together, after a failure. energy: JOBKIT_ENERGY, the counters that the ranks may read.
    """
    several = spec.nodes > 1
    values = {
        "NAME": name,
        "LABELS": {"app.kubernetes.io/name": "jobkit"}
        | ({QUEUE_LABEL: options.queue} if options.queue else {}),
        "NODES": spec.nodes,
        "BACKOFF": restarts * spec.nodes,
        "ANNOTATIONS": options.annotations(),
        "SUBDOMAIN": name if several else None,
        "GRACE": options.grace_s,
        "TOLERATIONS": options.tolerations(),
        "USER": options.user_id,
        "IMAGE": options.image,
        "ARGS": _args(name, run_dir, spec, options),
        "ENV": [{"name": k, "value": v} for k, v in _environment(energy).items()],
        "RESOURCES": _resources(spec, options),
        "SHM": options.shm_size,
        "CLAIM": options.volume_claim,
    }
    lines = []
    for line in ((SERVICE if several else "") + JOB).splitlines():
        names = re.findall("@([A-Z]+)", line)
        if all(values[name] is not None for name in names):
            lines.append(re.sub("@([A-Z]+)", lambda found: _yaml(values[found[1]]), line))
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """The value as JSON, which YAML reads, with escapes for all that YAML would not print."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def _args(name: str, run_dir: str, spec: PlannedRun, options: KubernetesOptions) -> list[str]:
    """What run.sh gets in a pod.

    The kubelet expands $(NAME), so that a user's own is written as $$(NAME).
    """
    size = ["--nproc-per-node", str(spec.ranks_per_node)]
    if spec.nodes > 1:
        size += ["--nnodes", str(spec.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
        size += ["--master-addr", f"{name}-0.{name}", "--master-port", str(PORT)]
        size += ["--start-timeout", str(_START_S)]
    ends = ["--shutdown-timeout", str(options.grace_s - _LAST_S)]
    folder = f"{MOUNT}/{run_dir}"
    own = [word.replace("$(", "$$(") for word in run_words(spec, folder)]
    return [*size, *ends, "--run-dir", folder, *own]


def _environment(energy: str) -> dict[str, str]:
    # The user has no entry in the image's /etc/passwd, and no home.
    env = {"HOME": "/tmp", "USER": "jobkit", "JOBKIT_LOGS": MOUNT}
    # JOBKIT_POD: an end by TERM is an eviction, and the exit code tells of the checkpoint.
    env |= {"JOBKIT_DATA_DIR": f"{MOUNT}/jobkit-data", "JOBKIT_POD": "1"}
    return env | ({"JOBKIT_ENERGY": energy} if energy else {})


def _resources(spec: PlannedRun, options: KubernetesOptions) -> dict[str, dict[str, str]]:
    without = options.gpu_resource == "none" or spec.planned_device == "cpu"
    gpus = {} if without else {options.gpu_resource: str(spec.ranks_per_node)}
    limits = {"memory": options.pod_memory, **gpus, **options.resources()}
    cpus = {"cpu": options.pod_cpus} if options.pod_cpus else {}
    return {"requests": {**cpus, "memory": options.pod_memory}, "limits": limits}
