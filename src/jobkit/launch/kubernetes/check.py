"""Finds a Job of Kubernetes whose pods would not become the ranks of one training.

Five rules, which no schema has. Everything else is for `kubectl apply --dry-run=server`.
"""

import re
from collections.abc import Mapping
from typing import Any

from jobkit.launch.findings import Finding, Findings

_INDEX = "JOB_COMPLETION_INDEX"
_PLACES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "PET_NODE_RANK")
_STARTERS = ("torchrun", "torch.distributed.run", "run.sh", "accelerate", "deepspeed", "mpirun")


def check(text: str) -> list[Finding]:
    """The findings on the text of a file with one or more manifests."""
    import yaml  # --help needs none

    report = Findings()
    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        report.error("", "not valid YAML: " + " ".join(str(error).split())[:300])
        return report.findings
    jobs = [document for document in documents if _at(document, "kind") == "Job"]
    if not jobs:
        report.error("", "has no Job")
    for job in jobs:
        for box in _list(job, "spec", "template", "spec", "containers"):
            _check_ranks(job, box, report)
    return list(dict.fromkeys(report.findings))


def _at(value: Any, *keys: str) -> Any:
    """What is under the keys; None where one is missing or its holder is no mapping."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _list(value: Any, *keys: str) -> list[Any]:
    found = _at(value, *keys)
    return found if isinstance(found, list) else []


def _check_ranks(job: Any, box: Any, report: Findings) -> None:
    """How the ranks of a container learn their places."""
    name, pods = _at(job, "metadata", "name"), _at(job, "spec", "parallelism")
    pods = pods if type(pods) is int else 1
    env = {str(_at(v, "name")): _at(v, "value") for v in _list(box, "env")}
    words = [str(w) for w in (*_list(box, "command"), *_list(box, "args"))]
    started = any(starter in " ".join(words) for starter in _STARTERS)
    for place in _PLACES:
        if pods > 1 and isinstance(env.get(place), str) and "$(" not in env[place]:
            report.error(f"env.{place}", f"{env[place]} in every pod: use $({_INDEX})")
    tells = _INDEX in " ".join(map(str, (*words, *env.values())))
    tells = tells or any(place in env and env[place] is None for place in _PLACES)  # valueFrom
    if pods > 1 and not tells:
        report.error(
            "args", f"nothing tells a pod which node it is: say --node-rank=$({_INDEX}), and write "
            "completionMode: Indexed"
        )  # fmt: skip
    limits = _at(box, "resources", "limits")
    counts = limits.items() if isinstance(limits, Mapping) else ()
    gpus = sum(int(n) for r, n in counts if "/gpu" in str(r) and re.fullmatch("[0-9]{1,3}", str(n)))
    if gpus > 1 and words and not started:
        report.error(
            "command", f"starts one process for {gpus} GPUs: use torchrun --nproc-per-node={gpus}"
        )
    size = env.get("WORLD_SIZE")
    if started and size is not None:
        report.warn("env.WORLD_SIZE", "the launcher sets it: remove it")
    elif gpus and re.fullmatch("[0-9]{1,9}", str(size)) and int(str(size)) != pods * gpus:
        report.error("env.WORLD_SIZE", f"{size}, and {pods} pods x {gpus} GPUs are {pods * gpus}")
    first = f"{name}-0.{_at(job, 'spec', 'template', 'spec', 'subdomain') or name}"
    address = env.get("MASTER_ADDR") or _option(words, "--master-addr", "--master_addr")
    if pods > 1 and isinstance(address, str) and "$(" not in address and address != first:
        report.error("env.MASTER_ADDR", f"no pod is called {address}: write {first}")


def _option(words: list[str], *names: str) -> str | None:
    """The value of an option of a command line."""
    for word, value in zip(words, [*words[1:], ""], strict=False):
        name, equals, own = word.partition("=")
        if name in names:
            return own if equals else value
    return None
