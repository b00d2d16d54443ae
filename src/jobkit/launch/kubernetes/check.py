"""Finds mistakes in manifests of Kubernetes that train with several pods."""

from collections.abc import Callable
from typing import Any

from jobkit.launch.findings import Finding, Findings
from jobkit.launch.kubernetes import rules
from jobkit.launch.kubernetes.rules import at, items, number, table

_INDEX, _KUBEFLOW_INDEX = "JOB_COMPLETION_INDEX", "PET_NODE_RANK"


def check(text: str) -> list[Finding]:
    """The findings on the text of a file with one or more manifests."""
    import yaml  # --help needs none

    report = Findings()
    try:
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        report.error("", "not valid YAML: " + " ".join(str(error).split())[:300])
        return report.findings
    if not any(str(at(d, "kind")) in KINDS for d in documents):
        report.error("", f"has none of {', '.join(KINDS)}")
    services = {str(at(d, "metadata", "name")): d for d in documents if at(d, "kind") == "Service"}
    for document in documents:
        kind = at(document, "kind")
        if isinstance(kind, str) and kind in KINDS:
            version, judge = KINDS[kind]
            rules.check_name(document, report)
            if (given := at(document, "apiVersion")) != version:
                report.error("apiVersion", f"{given!r}: of a {kind} it is {version}")
            judge(document, services, report)
        elif kind == "PyTorchJob":
            report.warn("kind", "PyTorchJob is of the former Training Operator: use a TrainJob")
        elif kind not in _OTHERS:
            report.note("kind", f"{kind!r} is not judged")
    return list(dict.fromkeys(report.findings))


_OTHERS = ("Service", "ConfigMap", "PersistentVolumeClaim", "Namespace", "ServiceAccount")


def _pods(job: Any) -> int:
    """How many pods run at once; 1 where that is not said."""
    return number(job, "parallelism") or 1


def _job(document: Any, services: dict[str, Any], report: Findings) -> None:
    job, name = at(document, "spec"), at(document, "metadata", "name")
    pod, pods = at(job, "template", "spec"), _pods(job)
    rules.check_job(job, "spec", report, pods)
    rules.check_pod(pod, "spec.template.spec", report)
    subdomain = at(pod, "subdomain")
    if pods > 1 and str(subdomain) not in services:
        report.error(
            "spec.template.spec.subdomain",
            f"{subdomain!r}: no headless Service of this name in the file: pods have no names",
        )
    elif pods > 1:
        _service(services[str(subdomain)], str(name), report)
    first = (f"{name}-0.{subdomain or name}",) if pods > 1 else ()
    for index, box in enumerate(items(pod, "containers")):
        key = f"spec.template.spec.containers[{index}]"
        rules.check_ranks(box, key, report, pods, first, _INDEX)


def _service(service: Any, job: str, report: Findings) -> None:
    spec, key = at(service, "spec"), f"Service {at(service, 'metadata', 'name')}"
    if at(spec, "clusterIP") != "None":
        report.error(f"{key}: spec.clusterIP", "must be None: else it names no single pod")
    if at(spec, "publishNotReadyAddresses") is not True:
        report.error(
            f"{key}: spec.publishNotReadyAddresses", "must be true: the ranks meet before readiness"
        )
    selected = table(spec, "selector")
    for label in ("batch.kubernetes.io/job-name", "job-name"):
        if selected.get(label, job) != job:
            report.error(f"{key}: spec.selector", f"selects {selected[label]}, not {job}")
    if not selected:
        report.error(f"{key}: spec.selector", f"missing: batch.kubernetes.io/job-name: {job}")


def _job_set(document: Any, services: dict[str, Any], report: Findings) -> None:
    spec, name = at(document, "spec"), at(document, "metadata", "name")
    if at(spec, "failurePolicy", "maxRestarts") is None:
        report.warn("spec.failurePolicy.maxRestarts", "missing: one failed pod ends the training")
    if at(spec, "network", "enableDNSHostnames") is False:
        report.error("spec.network.enableDNSHostnames", "must be true: pods have no names")
    if at(spec, "network", "publishNotReadyAddresses") is False:
        report.error("spec.network.publishNotReadyAddresses", "must be true")
    for place, group in enumerate(items(spec, "replicatedJobs")):
        key, job = f"spec.replicatedJobs[{place}].template.spec", at(group, "template", "spec")
        pods, pod = _pods(job), at(job, "template", "spec")
        rules.check_job(job, key, report, pods)
        rules.check_pod(pod, f"{key}.template.spec", report)
        if at(job, "backoffLimit") != 0:
            report.warn(f"{key}.backoffLimit", "write 0: the JobSet starts all pods again together")
        first = (f"{name}-{at(group, 'name')}-0-0.{at(spec, 'network', 'subdomain') or name}",)
        for index, box in enumerate(items(pod, "containers")):
            box_key = f"{key}.template.spec.containers[{index}]"
            rules.check_ranks(box, box_key, report, pods, first, _INDEX)


def _train_job(document: Any, services: dict[str, Any], report: Findings) -> None:
    spec = at(document, "spec")
    trainer = table(spec, "trainer")
    if not at(spec, "runtimeRef", "name"):
        report.error("spec.runtimeRef.name", "missing: write torch-distributed")
    for name in ("numNodes", "numProcPerNode"):
        if (count := at(trainer, name)) is not None and (type(count) is not int or count < 1):
            report.error(f"spec.trainer.{name}", f"{count!r}: must be a whole number, 1 or more")
    rules.check_gpus(at(trainer, "resourcesPerNode"), "spec.trainer.resourcesPerNode", report)
    box = {**trainer, "resources": at(trainer, "resourcesPerNode")}
    rules.check_container(box, "spec.trainer", report)
    words = " ".join(str(w) for w in (*items(box, "command"), *items(box, "args")))
    nodes = at(trainer, "numNodes")
    # torchrun reads the variables PET_* itself; another launcher must be told.
    pods = nodes if type(nodes) is int and "torchrun" not in words and words else 1
    rules.check_ranks(box, "spec.trainer", report, pods, (), _KUBEFLOW_INDEX)


KINDS: dict[str, tuple[str, Callable[[Any, dict[str, Any], Findings], None]]] = {
    "Job": ("batch/v1", _job),
    "JobSet": ("jobset.x-k8s.io/v1alpha2", _job_set),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", _train_job),
}
