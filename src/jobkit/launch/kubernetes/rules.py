"""The rules for the pods of a training on Kubernetes, each with its fix.

They are rules of the API server that are in no schema (kubernetes.io/docs/reference, validation of
batch/v1 Jobs), and what torch's ranks need to find each other. Types and unknown keys are for a
schema: kubectl apply --dry-run=server, or kubernetes-validate.
"""

import re
from collections.abc import Mapping
from typing import Any

from jobkit.launch.findings import Findings
from jobkit.launch.kubernetes.options import NAME, amount

_PLACES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "PET_NODE_RANK")
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL)", re.I)
_STARTERS = ("torchrun", "torch.distributed.run", "run.sh", "accelerate", "deepspeed", "mpirun")
_DEFAULT_GRACE_S, _LEAST_GRACE_S, _TORCHRUN_S = 30, 60, 30


def at(value: Any, *keys: str) -> Any:
    """What is under the keys; None where one is missing or its holder is no mapping."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def items(value: Any, *keys: str) -> list[Any]:
    """The list under the keys; empty where there is none."""
    found = at(value, *keys)
    return found if isinstance(found, list) else []


def table(value: Any, *keys: str) -> Mapping[str, Any]:
    """The mapping under the keys; empty where there is none."""
    found = at(value, *keys)
    return found if isinstance(found, Mapping) else {}


def number(value: Any, *keys: str) -> int | None:
    """The whole number under the keys; None where there is none."""
    found = at(value, *keys)
    return found if type(found) is int else None


def named(value: Any, *keys: str) -> dict[str, Any]:
    """The elements of the list under the keys, by their name."""
    return {str(at(each, "name")): each for each in items(value, *keys)}


def check_name(document: Any, report: Findings) -> None:
    """The name must be a DNS label that leaves room for the pods' indexes."""
    name = at(document, "metadata", "name")
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > 58:
        report.error("metadata.name", f"{name!r}: use lower-case letters, digits and -, at most 58")


def check_job(job: Any, key: str, report: Findings, pods: int) -> None:
    """The rules of a Job's spec, whose pods train together."""
    mode, completions = at(job, "completionMode"), at(job, "completions")
    if mode not in (None, "NonIndexed", "Indexed"):
        report.error(f"{key}.completionMode", f"{mode!r}: must be Indexed")
    elif mode != "Indexed" and pods > 1:
        report.error(
            f"{key}.completionMode", "no pod knows which node it is: write completionMode: Indexed"
        )
    if mode == "Indexed" and completions is None:
        report.error(f"{key}.completions", "missing: Indexed needs it, as many as parallelism")
    elif pods > 1 and completions != pods:
        report.error(
            f"{key}.completions",
            f"{completions} and parallelism {pods}: must be equal, else ranks "
            "wait for pods that do not run",
        )
    _check_restarts(job, key, report, pods)
    policy = at(job, "template", "spec", "restartPolicy")
    if policy not in ("Never", "OnFailure"):
        report.error(
            f"{key}.template.spec.restartPolicy",
            f"{policy or 'missing, which means Always'}: a Job takes Never or OnFailure only",
        )


def _check_restarts(job: Any, key: str, report: Findings, pods: int) -> None:
    """What happens after a pod has failed."""
    rules, backoff = at(job, "podFailurePolicy"), number(job, "backoffLimit")
    if at(job, "backoffLimitPerIndex") is not None:
        report.error(
            f"{key}.backoffLimitPerIndex",
            "is for indexes that work alone; the ranks need each other: use backoffLimit",
        )
    if backoff is not None and 0 < backoff < pods:
        report.warn(
            f"{key}.backoffLimit",
            f"{backoff}: counts pods, and one failure ends all {pods}: use {pods} for each restart",
        )
    if pods > 1 and at(job, "podReplacementPolicy") != "Failed":
        report.warn(
            f"{key}.podReplacementPolicy",
            "two pods may run the same index for a while: write podReplacementPolicy: Failed",
        )
    if rules is not None and at(job, "template", "spec", "restartPolicy") == "OnFailure":
        report.error(f"{key}.podFailurePolicy", "needs restartPolicy: Never")
    boxes = named(job, "template", "spec", "containers")
    for index, rule in enumerate(items(rules, "rules")):
        wanted = at(rule, "onExitCodes", "containerName")
        if wanted is not None and wanted not in boxes:
            report.error(
                f"{key}.podFailurePolicy.rules[{index}]",
                f"no container '{wanted}' (known: {', '.join(boxes)})",
            )


def check_pod(pod: Any, key: str, report: Findings) -> None:
    """The rules of a pod and of each of its containers."""
    grace = number(pod, "terminationGracePeriodSeconds")
    if (_DEFAULT_GRACE_S if grace is None else grace) < _LEAST_GRACE_S:
        report.warn(
            f"{key}.terminationGracePeriodSeconds",
            f"{_DEFAULT_GRACE_S if grace is None else grace} s from SIGTERM to SIGKILL: a "
            "checkpoint may take longer, write 120",
        )
    boxes = items(pod, "containers")
    if not boxes:
        report.error(f"{key}.containers", "missing: a pod needs a container")
    for index, box in enumerate(boxes):
        where = f"{key}.containers[{index}]"
        check_container(box, where, report)
        _check_shutdown(box, grace, where, report)
        _check_user(pod, box, where, report)
        _check_volumes(pod, box, where, report)


def check_container(box: Any, key: str, report: Findings) -> None:
    """The rules of a container by itself."""
    image = at(box, "image")
    if isinstance(image, str) and (
        ":" not in image.rsplit("/", 1)[-1] or image.endswith(":latest")
    ):
        report.warn(f"{key}.image", f"{image}: may change between two starts: give a tag or digest")
    words = [str(w) for w in (*items(box, "command"), *items(box, "args"))]
    shell = len(words) > 2 and words[0].rsplit("/", 1)[-1] in ("sh", "bash") and words[1] == "-c"
    if shell and "exec " not in words[2]:
        report.warn(f"{key}.command", "the shell gets SIGTERM, not the training: write exec")
    check_gpus(at(box, "resources"), f"{key}.resources", report)
    for index, variable in enumerate(items(box, "env")):
        name = str(at(variable, "name"))
        if _SECRET.search(name) and at(variable, "value"):
            report.error(f"{key}.env[{index}]", f"{name}: a secret in plain text: use secretKeyRef")


def check_gpus(resources: Any, key: str, report: Findings) -> None:
    """GPUs are whole, and limits."""
    for part in ("limits", "requests"):
        for name, count in table(resources, part).items():
            if "/" not in str(name):
                continue
            if not re.fullmatch("[0-9]+", str(count)) or isinstance(count, bool):
                report.error(f"{key}.{part}.{name}", f"{count!r}: must be a whole number")
            elif part == "requests" and str(at(resources, "limits", name)) != str(count):
                report.error(f"{key}.{part}.{name}", f"give limits.{name}: {count} too")


def check_ranks(
    box: Any, key: str, report: Findings, pods: int, first: tuple[str, ...], index: str
) -> None:
    """How a rank learns its place.

    first: the names that the first pod has. index: the variable that tells a pod which it is.
    """
    values = {str(at(v, "name")): at(v, "value") for v in items(box, "env")}
    words = [str(w) for w in (*items(box, "command"), *items(box, "args"))]
    line, started = " ".join(words), any(s in " ".join(words) for s in _STARTERS)
    for name in _PLACES:
        if pods > 1 and isinstance(values.get(name), str) and "$(" not in values[name]:
            report.error(f"{key}.env.{name}", f"{values[name]} in every pod: use $({index})")
    own = index in line or any(index in str(v) for v in values.values())
    own = own or any(name in values and values[name] is None for name in _PLACES)  # valueFrom
    if pods > 1 and not own:
        report.error(
            f"{key}.args", f"nothing tells a pod which node it is: say --node-rank=$({index})"
        )
    gpus = sum(
        int(n) for r, n in table(box, "resources", "limits").items()
        if "/gpu" in str(r) and re.fullmatch("[0-9]{1,3}", str(n))
    )  # fmt: skip
    if gpus > 1 and words and not started:
        report.error(
            f"{key}.command",
            f"starts one process for {gpus} GPUs: use torchrun --nproc-per-node={gpus}",
        )
    size = values.get("WORLD_SIZE")
    if started and size is not None:
        report.warn(f"{key}.env.WORLD_SIZE", "the launcher sets it: remove it")
    elif gpus and re.fullmatch("[0-9]{1,9}", str(size)) and int(str(size)) != pods * gpus:
        report.error(
            f"{key}.env.WORLD_SIZE", f"{size}, and {pods} pods x {gpus} GPUs are {pods * gpus}"
        )
    address = values.get("MASTER_ADDR") or _option(words, "--master-addr", "--master_addr")
    wrong = isinstance(address, str) and "$(" not in address and address not in first
    if pods > 1 and first and wrong:
        report.error(f"{key}.env.MASTER_ADDR", f"no pod is called {address}: write {first[0]}")


def _option(words: list[str], *names: str) -> str | None:
    """The value of an option of a command line."""
    for word, value in zip(words, [*words[1:], ""], strict=False):
        name, equals, own = word.partition("=")
        if name in names:
            return own if equals else value
    return None


def _check_shutdown(box: Any, grace: int | None, key: str, report: Findings) -> None:
    """torchrun kills its ranks before the pod is killed, and not before they have saved."""
    words = [str(w) for w in (*items(box, "command"), *items(box, "args"))]
    given = _option(words, "--shutdown-timeout", "--shutdown_timeout")
    if "torchrun" in words and given is None and grace is not None and grace > _TORCHRUN_S:
        report.warn(
            f"{key}.args",
            f"torchrun kills the ranks after {_TORCHRUN_S} s: add --shutdown-timeout={grace - 10}",
        )
    if (
        given is not None
        and grace is not None
        and re.fullmatch("[0-9]{1,9}", given)
        and int(given) >= grace
    ):
        report.error(
            f"{key}.args", f"--shutdown-timeout {given} is not below the grace of {grace} s"
        )


def _check_user(pod: Any, box: Any, key: str, report: Findings) -> None:
    for context in (at(box, "securityContext"), at(pod, "securityContext")):
        if at(context, "runAsNonRoot") or (number(context, "runAsUser") or 0) != 0:
            return
    report.warn(
        f"{key}.securityContext", "runs as the image's user, often root: runAsNonRoot: true"
    )


def _check_volumes(pod: Any, box: Any, key: str, report: Findings) -> None:
    volumes, mounts = named(pod, "volumes"), items(box, "volumeMounts")
    for mount in mounts:
        if (name := str(at(mount, "name"))) not in volumes:
            report.error(f"{key}.volumeMounts", f"no volume '{name}' in the pod")
    shm = [volumes.get(str(at(m, "name"))) for m in mounts if at(m, "mountPath") == "/dev/shm"]
    if not shm:
        report.warn(
            f"{key}.volumeMounts", "/dev/shm has 64 MiB: mount an emptyDir with medium: Memory"
        )
    elif at(shm[0], "emptyDir", "medium") != "Memory":
        report.warn(f"{key}.volumeMounts", "/dev/shm is on a disk: write medium: Memory")
    size = amount(at(shm[0], "emptyDir", "sizeLimit")) if shm else None
    memory = amount(at(box, "resources", "limits", "memory"))
    if size and memory and size >= memory:
        report.error(
            f"{key}.resources.limits.memory", "/dev/shm counts against it, and is as large"
        )
    if all(at(volumes.get(str(at(m, "name"))), "emptyDir") is not None for m in mounts):
        report.warn(f"{key}.volumeMounts", "checkpoints and logs end with the pod: mount a volume")
