"""A run of a plan as manifests of Kubernetes: pure data, no effects.

Sources: the API of batch/v1 (kubernetes.io/docs/concepts/workloads/controllers/job), JobSet
v1alpha2 (jobset.sigs.k8s.io), TrainJob v1alpha1 of Kubeflow Trainer 2.2 and newer
(kubeflow.org/docs/components/trainer), Kueue's queue label (kueue.sigs.k8s.io).
"""

import hashlib
import re
from typing import Any

from jobkit.errors import Exit
from jobkit.launch.kubernetes.options import KubernetesOptions
from jobkit.spec.planned import PlannedRun

PORT = 29500
MOUNT = "/runs"  # where the pods have the volume
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_LONGEST = 50  # of a name: the controllers add the pod's index and, for a JobSet, more
_NODE = "node"  # the replicated job of a JobSet, and of Kubeflow's runtime torch-distributed
# `exec`, so that run.sh is the container's first process and gets its signals.
_START = 'exec bash "$(python -m jobkit --prefix)/run.sh" "$@"'
# run.sh ends what is left of the ranks this long before the container is killed.
_LAST_S = 15
# The pods wait so long for each other: images are pulled, and a pod that failed is started again
# up to 6 minutes later. A node that has waited in vain ends with 1, which the Job counts.
_START_S = 900


def object_name(study: str, run_id: str) -> str:
    """A name that every object and pod of the run may have: a DNS label, unique by the run."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{study}-{run_id}".lower()).strip("-")
    if len(name) <= _LONGEST and name[:1].isalpha():
        return name
    mark = hashlib.sha256(f"{study}/{run_id}".encode()).hexdigest()[:8]
    return f"r-{name[: _LONGEST - 11].strip('-')}-{mark}"


def manifests(
    name: str,
    run_dir: str,
    spec: PlannedRun,
    options: KubernetesOptions,
    restarts: int,
    energy: str = "",
) -> list[dict[str, Any]]:
    """The documents of one run.

    name: of its objects. run_dir: its folder, relative to the volume. restarts: of all its pods
    together, after a failure. energy: JOBKIT_ENERGY, the counters that the ranks may read.
    """
    if options.kind == "trainjob":
        return [_train_job(name, run_dir, spec, options, energy)]
    subdomain = name
    first = f"{name}-0.{subdomain}" if options.kind == "job" else f"{name}-{_NODE}-0-0.{subdomain}"
    rank = "$(JOB_COMPLETION_INDEX)"
    words = _words(run_dir, spec, options, rank, first)
    pod = _pod(options, _container(spec, options, words, energy))
    if options.kind == "jobset":
        return [_job_set(name, spec, options, pod, restarts)]
    names = {"subdomain": subdomain} if spec.nodes > 1 else {}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(name, options),
        # A training whose pod fails loses all of its pods, and each of them counts.
        "spec": _job_spec(spec, pod | names, restarts * spec.nodes),
    }
    return [_service(name), job] if spec.nodes > 1 else [job]


def _metadata(name: str, options: KubernetesOptions) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "jobkit"}
    return {
        "name": name,
        "labels": labels | ({QUEUE_LABEL: options.queue} if options.queue else {}),
    }


def _service(name: str) -> dict[str, Any]:
    """The headless Service that gives the pods their names, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "jobkit"}},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job_spec(spec: PlannedRun, pod: dict[str, Any], backoff: int) -> dict[str, Any]:
    ours = {"containerName": "train", "operator": "In"}
    return {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "backoffLimit": backoff,
        "podReplacementPolicy": "Failed",  # else two pods may run one index for a while
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": ours | {"values": [int(Exit.USAGE)]}},
                # Stopped early with a checkpoint, or evicted: starts again, and does not count.
                {"action": "Ignore", "onExitCodes": ours | {"values": [int(Exit.AGAIN)]}},
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": {"spec": pod},
    }


def _job_set(
    name: str, spec: PlannedRun, options: KubernetesOptions, pod: dict[str, Any], restarts: int
) -> dict[str, Any]:
    fail = {"name": "badInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, options),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": restarts, "rules": [fail]},
            "replicatedJobs": [
                {"name": _NODE, "replicas": 1, "template": {"spec": _job_spec(spec, pod, 0)}}
            ],
        },
    }


def _train_job(
    name: str, run_dir: str, spec: PlannedRun, options: KubernetesOptions, energy: str
) -> dict[str, Any]:
    """A TrainJob on the runtime torch-distributed, which names the ranks' places itself."""
    words = _words(run_dir, spec, options, "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)")
    box = _container(spec, options, words, energy)
    pod = _pod(options, {"name": _NODE})
    patch = {
        "name": _NODE,
        "template": {
            "spec": {
                "template": {
                    "spec": {
                        "securityContext": pod["securityContext"],
                        "terminationGracePeriodSeconds": options.grace_s,
                        "volumes": pod["volumes"],
                        "containers": [
                            {
                                "name": _NODE,
                                "securityContext": box["securityContext"],
                                "volumeMounts": box["volumeMounts"],
                            }
                        ],
                    }
                }
            }
        },
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(name, options),
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "numNodes": spec.nodes,
                "numProcPerNode": spec.ranks_per_node,
                "image": options.image,
                "command": box["command"],
                "args": box["args"],
                "env": box["env"],
                "resourcesPerNode": box["resources"],
            },
            "runtimePatches": [
                {
                    "manager": "jobkit/run-benchmarks",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
                }
            ],
        },
    }


def _words(
    run_dir: str, spec: PlannedRun, options: KubernetesOptions, rank: str, first: str
) -> list[str]:
    """What run.sh gets in a pod.

    The kubelet expands $(NAME), so that a user's own is written as $$(NAME).
    """
    size = ["--nproc-per-node", str(spec.ranks_per_node)]
    if spec.nodes > 1:
        size += ["--nnodes", str(spec.nodes), "--node-rank", rank, "--master-addr", first]
        size += ["--master-port", str(PORT), "--start-timeout", str(_START_S)]
    ends = ["--shutdown-timeout", str(options.grace_s - _LAST_S)]
    own = [word.replace("$(", "$$(") for word in spec.arguments()]
    return [*size, *ends, "--run-dir", f"{MOUNT}/{run_dir}", *own]


def _pod(options: KubernetesOptions, container: dict[str, Any]) -> dict[str, Any]:
    user = options.user_id
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        "automountServiceAccountToken": False,  # the training asks nothing of the API server
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm_size}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.volume_claim}},
        ],
    }


def _container(
    spec: PlannedRun, options: KubernetesOptions, words: list[str], energy: str
) -> dict[str, Any]:
    memory = {"memory": options.pod_memory}
    without = options.gpu_resource == "none" or spec.planned_device == "cpu"
    gpus = {} if without else {options.gpu_resource: str(spec.ranks_per_node)}
    cpus = {"cpu": options.pod_cpus} if options.pod_cpus else {}
    # The user has no entry in the image's /etc/passwd, and no home.
    env = {"HOME": "/tmp", "USER": "jobkit", "JOBKIT_LOGS": MOUNT}
    # JOBKIT_POD: an end by TERM is an eviction, and the exit code tells of the checkpoint.
    env |= {"JOBKIT_DATA_DIR": f"{MOUNT}/jobkit-data", "JOBKIT_POD": "1"}
    env |= {"JOBKIT_ENERGY": energy} if energy else {}
    return {
        "name": "train",
        "image": options.image,
        "command": ["bash", "-c", _START, "run.sh"],
        "args": words,
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "resources": {"requests": {**cpus, **memory}, "limits": {**memory, **gpus}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "runs", "mountPath": MOUNT},
        ],
    }
