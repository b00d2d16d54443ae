"""What the manifests of a study need that its plan does not say."""

import re
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, fields
from typing import Any

from jobkit.errors import UsageError
from jobkit.spec.settings import check_fields, setting

QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(m|k|[KMGTPE]i|[MGTPE])?")  # as 500m, 64Gi
_UNITS = {"": 1, "m": 1e-3, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {"E": 10**18, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_UNITS |= {"Ei": 2**60}
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # a DNS label, RFC 1123
_KEY = r"(?:[a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9][-A-Za-z0-9_.]*"  # as rdma/hca or dedicated
_RESOURCE = re.compile(r"[a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*|none")
_PAIR = re.compile(f"({_KEY})=(.*)")
_TOLERATION = re.compile(
    f"({_KEY})(?:=([-A-Za-z0-9_.]*))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?"
)


def amount(text: Any) -> float | None:
    """Bytes or cores of a quantity such as 64Gi or 500m; None for what is none."""
    found = QUANTITY.fullmatch(str(text))
    return float(found[1]) * _UNITS[found[2] or ""] if found else None


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The options of --to kubernetes. Raises UsageError for one that the API server refuses."""

    image: str = setting("", "container image with jobkit and torch")
    queue: str = setting("", "local queue of Kueue")
    volume_claim: str = setting("jobkit-runs", "PersistentVolumeClaim for the runs, which all "
                                "pods mount")  # fmt: skip
    gpu_resource: str = setting("nvidia.com/gpu", "resource of which a pod gets one per rank; "
                                "none: without GPUs")  # fmt: skip
    pod_cpus: str = setting("", "CPU cores requested by a pod, as 16")
    pod_memory: str = setting("64Gi", "memory of a pod, its /dev/shm included")
    shm_size: str = setting("8Gi", "size of /dev/shm, which counts as memory of the pod")
    grace_s: int = setting(120, "seconds from SIGTERM to SIGKILL", low=30)
    user_id: int = setting(1000, "user and group id of the processes", low=1)
    resource: tuple[str, ...] = setting((), "more resources of a pod, as rdma/hca=1")
    toleration: tuple[str, ...] = setting((), "taints that the pods tolerate, as "
                                          "dedicated=gpu:NoSchedule or nvidia.com/gpu")  # fmt: skip
    annotation: tuple[str, ...] = setting((), "annotations of the pods, as KEY=VALUE")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.image:
            raise UsageError("--to kubernetes needs --image, as registry.example.org/jobkit:1.0")
        if any(c.isspace() for c in self.image):
            raise UsageError(f"--image '{self.image}': must have no blanks")
        for name in ("queue", "volume_claim"):
            value = getattr(self, name)
            if (value or name == "volume_claim") and not NAME.fullmatch(value):
                raise UsageError(
                    f"--{name.replace('_', '-')} '{value}': must be lower-case letters, digits and "
                    "-, at most 63"
                )
        for name in ("pod_cpus", "pod_memory", "shm_size"):
            value = getattr(self, name)
            if (value or name != "pod_cpus") and not QUANTITY.fullmatch(value):
                raise UsageError(f"--{name.replace('_', '-')} '{value}': must be as 16 or 64Gi")
        shm, memory = amount(self.shm_size), amount(self.pod_memory)
        if shm is not None and memory is not None and shm >= memory:
            raise UsageError(
                f"--shm-size {self.shm_size}: /dev/shm counts as memory of the pod, which has "
                f"--pod-memory {self.pod_memory}: make one smaller or the other larger"
            )
        if not _RESOURCE.fullmatch(self.gpu_resource):
            raise UsageError(
                f"--gpu-resource '{self.gpu_resource}': must be as amd.com/gpu, or none"
            )
        for word in self.toleration:
            if not _TOLERATION.fullmatch(word):
                raise UsageError(
                    f"--toleration '{word}': must be as KEY, KEY=VALUE or KEY:NoSchedule"
                )
        for name in ("resource", "annotation"):
            for word in getattr(self, name):
                found = _PAIR.fullmatch(word)
                if not found or (name == "resource" and not QUANTITY.fullmatch(found[2])):
                    raise UsageError(f"--{name} '{word}': must be as {_AS[name]}")

    def resources(self) -> dict[str, str]:
        """Name and quantity of the resources beside GPUs and memory."""
        return dict(_pair(word) for word in self.resource)

    def annotations(self) -> dict[str, str] | None:
        """The pods' annotations; None without any."""
        return dict(_pair(word) for word in self.annotation) or None

    def tolerations(self) -> list[dict[str, str]] | None:
        """The pods' tolerations; None without any."""
        made = []
        for word in self.toleration:
            key, value, effect = _TOLERATION.fullmatch(word).groups()  # type: ignore[union-attr]
            how = {"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}
            made.append({"key": key, **how, **({"effect": effect} if effect else {})})
        return made or None


_AS = {"resource": "rdma/hca=1", "annotation": "KEY=VALUE"}


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


def add_kubernetes_arguments(made: ArgumentParser) -> None:
    """Add --to and the options of Kubernetes."""
    group = made.add_argument_group("Kubernetes", "Only with --to kubernetes.")
    group.add_argument(
        "--to",
        choices=("kubernetes",),
        help="write one manifest per run into the study's folder, and start nothing",
    )
    for field in fields(KubernetesOptions):
        about: dict[str, Any] = dict(field.metadata)
        many: dict[str, Any] = {"nargs": "+", "action": "extend"} if field.default == () else {}
        shown = f" (default {field.default})" if field.default not in ("", ()) else ""
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=f"k8s_{field.name}",
            type=int if isinstance(field.default, int) else str,
            metavar="X",
            help=about["help"] + shown,
            **many,
        )


def kubernetes_options(args: Namespace) -> KubernetesOptions | None:
    """The options, or None without --to. Raises UsageError for a bad value, or one without it."""
    names = [field.name for field in fields(KubernetesOptions)]
    given = {n: v for n in names if (v := getattr(args, f"k8s_{n}")) is not None}
    if args.to:
        return KubernetesOptions(**given)
    if given:
        option = next(iter(given)).replace("_", "-")
        raise UsageError(f"--{option} is for --to kubernetes: add that, or leave it out")
    return None
