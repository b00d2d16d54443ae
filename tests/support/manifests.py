"""Manifests of one run, as the tests take them."""

import copy
from typing import Any

import yaml

from jobkit.launch.kubernetes.check import check
from jobkit.launch.kubernetes.manifest import manifests
from jobkit.launch.kubernetes.options import KubernetesOptions
from jobkit.spec.runspec import RunSpec

IMAGE = "registry.example.org/jobkit:1.0"
SPEC = RunSpec(strategy="ddp", nodes=2, ranks_per_node=4)


def made(kind: str = "job", spec: Any = SPEC, **given: Any) -> list[dict[str, Any]]:
    options = KubernetesOptions(image=IMAGE, kind=kind, **given)
    return copy.deepcopy(manifests("train", "study/run", spec, options, 3))


def said(documents: list[dict[str, Any]], severity: str = "error") -> str:
    found = check(yaml.safe_dump_all(documents))
    return "\n".join(f"{f.key}: {f.message}" for f in found if f.severity == severity)


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    if document["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["template"]["spec"]
