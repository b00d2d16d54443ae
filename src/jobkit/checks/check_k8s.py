"""`python -m jobkit check-k8s`: whether the pods of a Job become the ranks of one training.

Checked are five rules which no schema has.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jobkit.errors import Exit, Parser, command, one_line
from jobkit.files import MAX_TOML, read_text

Finding = tuple[str, str]  # the key, as env.RANK; the mistake, and its correction
_INDEX = "JOB_COMPLETION_INDEX"
_PLACES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "PET_NODE_RANK")
_STARTERS = ("torchrun", "torch.distributed.run", "run.sh", "accelerate", "deepspeed", "mpirun")


def check_k8s(text: str) -> list[Finding]:
    """The findings on the text of a file with one or more manifests."""
    import yaml  # --help needs none

    try:
        documents = filter(None, yaml.safe_load_all(text))
        jobs = [document for document in documents if document["kind"] == "Job"]
        findings = [finding for job in jobs for finding in _check_ranks(job)]
    except (yaml.YAMLError, RecursionError) as error:
        return [("", "not valid YAML: " + " ".join(str(error).split())[:300])]
    except (AttributeError, KeyError, TypeError, ValueError):
        return [("", "is no Job as Kubernetes reads it")]
    return findings if jobs else [("", "has no Job")]


def _check_ranks(job: Any) -> Iterator[Finding]:
    """How the ranks of a Job's containers learn their places."""
    pods, template = job["spec"].get("parallelism") or 1, job["spec"]["template"]["spec"]
    name = job.get("metadata", {}).get("name")
    first = f"{name}-0.{template.get('subdomain') or name}"
    for container in template["containers"]:
        env = {str(v["name"]): v.get("value") for v in container.get("env") or ()}
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        line, values = " ".join(map(str, words)), " ".join(map(str, env.values()))
        for place in _PLACES:
            if pods > 1 and isinstance(env.get(place), str) and "$(" not in env[place]:
                yield f"env.{place}", f"{env[place]} in every pod: use $({_INDEX})"
        given = any(place in env and env[place] is None for place in _PLACES)  # valueFrom
        if pods > 1 and not given and _INDEX not in line + values:
            fix = f"say --node-rank=$({_INDEX}), and write completionMode: Indexed"
            yield "args", f"nothing tells a pod which node it is: {fix}"
        limits = (container.get("resources") or {}).get("limits") or {}
        gpus = sum(int(count) for resource, count in limits.items() if "/gpu" in resource)
        started, size = any(starter in line for starter in _STARTERS), env.get("WORLD_SIZE")
        if gpus > 1 and line and not started:
            fix = f"use torchrun --nproc-per-node={gpus}"
            yield "command", f"starts one process for {gpus} GPUs: {fix}"
        if gpus and not started and size and int(size) != pods * gpus:
            text = f"{size}, and {pods} pods x {gpus} GPUs are {pods * gpus}"
            yield "env.WORLD_SIZE", text
        option = re.search(r"--master[-_]addr[= ](\S+)", line)
        address = env.get("MASTER_ADDR") or (option[1] if option else None)
        if pods > 1 and address and "$(" not in address and address != first:
            yield "env.MASTER_ADDR", f"no pod is called {address}: write {first}"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check the files and print the findings; 2 where there is one."""
    options = Parser(
        prog="jobkit check-k8s",
        description="Check that the pods of a Job become the ranks of one training; all else is "
        "for kubectl apply --dry-run=server.",
        epilog="example:\n  python -m jobkit check-k8s logs/strong/kubernetes/*.yaml\n\n"
        "exit codes: 0 no error; 2 an error in a file, or no such file",
    )
    text = "a file of manifests, in YAML or JSON"
    options.add_argument("files", nargs="+", metavar="FILE", help=text)
    files, errors = dict.fromkeys(options.parse_args(argv).files), 0
    for name in files:
        try:
            findings = check_k8s(read_text(name, MAX_TOML))
        except (OSError, ValueError) as error:
            findings = [("", f"cannot be read: {getattr(error, 'strerror', error)}")]
        for finding in dict.fromkeys(findings):
            print(one_line(": ".join(filter(None, (name, "error", *finding)))))
            errors += 1
    print(f"files: {len(files)}, errors: {errors}")
    return Exit.USAGE if errors else Exit.OK
