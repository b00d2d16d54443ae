"""Checks of a user's files before a job waits in a queue with them: check-edf and check-k8s.

An EDF is an environment definition file of the CSCS container engine. A mistake in one is found
when the job starts; and without its network hook a job is slow, not wrong. Of a Job of Kubernetes
five rules are checked which no schema has: that its pods become the ranks of one training.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobkit.errors import Exit, Parser, command, nearest, one_line
from jobkit.files import MAX_TOML, is_there, read_text
from jobkit.launch.command import RANK_VARIABLES

# Error or warning (it may be meant); the key, such as mounts[1]; the mistake, and its correction.
Finding = tuple[str, str, str]


def _parser(name: str, files: str, description: str, example: str) -> Parser:
    options = Parser(
        prog=f"jobkit {name}",
        description=description,
        epilog=f"example:\n  python -m jobkit {name} {example}\n\n"
        "exit codes: 0 no error (warnings are no error); 2 an error in a file, or no such file",
    )
    options.add_argument("files", nargs="+", metavar="FILE", help=files)
    return options


def _report(files: Sequence[str], check: Callable[[str], list[Finding]]) -> int:
    """Check each file's text, print the findings; 2 where one is an error."""
    severities = []
    for name in dict.fromkeys(files):
        try:
            findings = check(read_text(name, MAX_TOML))
        except (OSError, ValueError) as error:
            findings = [("error", "", f"cannot be read: {getattr(error, 'strerror', error)}")]
        for finding in dict.fromkeys(findings):
            print(one_line(": ".join(filter(None, (name, *finding)))))
            severities.append(finding[0])
    errors = severities.count("error")
    print(f"files: {len(set(files))}, errors: {errors}, warnings: {len(severities) - errors}")
    return Exit.USAGE if errors else Exit.OK


# --- EDF --------------------------------------------------------------------------------------

_STRING, _BOOL = (str, "a string"), (bool, "true or false (without quotes)")
_ARRAY, _TABLE = (list, "an array of strings"), (dict, "a table")
_FORMS: dict[str, tuple[Any, str]] = {
    "base_environment": (str | list, "a string or an array of strings"),
    **dict.fromkeys(("image", "workdir"), _STRING),
    **dict.fromkeys(("entrypoint", "writable"), _BOOL),
    **dict.fromkeys(("mounts", "devices"), _ARRAY),
    **dict.fromkeys(("env", "annotations"), _TABLE),
}
_CXI, _NCCL = "com.hooks.cxi.enabled", "com.hooks.aws_ofi_nccl.enabled"
_VARIANT, _REMAP = "com.hooks.aws_ofi_nccl.variant", "com.pyxis.pytorch_remap_vars"
_ANNOTATIONS = [_CXI, _NCCL, _VARIANT, _REMAP, "com.pyxis.entrypoint_log"]
_HOOKS = ["nvidia_cuda_mps.enabled", "dcgm.enabled", "slurm.enabled", "ssh.enabled", "ssh.port"]
_HOOKS += ["ssh.authorize_ssh_key", "netstack.source", "netstack.version", "netstack.name"]
_ANNOTATIONS += [f"com.hooks.{name}" for name in _HOOKS]
_VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(:-[^}]*)?\}")  # $$ stands for a dollar sign


def check_edf(text: str, environ: Mapping[str, str], here: bool = True) -> list[Finding]:
    """The findings on the text of an EDF, as srun with this environment would read it.

    Relative paths start in the current folder. here: False when the jobs run on another machine, so
    that paths are not checked and an undefined variable is only a warning.
    """
    try:
        data = tomllib.loads(text)
    except ValueError as error:
        return [("error", "", f"not valid TOML: {error}")]
    findings, values = list[Finding](), dict[str, Any]()
    for name, whole in data.items():
        form, words = _FORMS.get(name, (object, ""))
        if not words:
            message = f"unknown key{nearest(name, _FORMS)} (known: {', '.join(_FORMS)})"
            findings.append(("error", name, message))
        elif not isinstance(whole, form):
            findings.append(("error", name, f"must be {words}"))
        elif isinstance(whole, list):
            values |= {f"{name}[{index}]": part for index, part in enumerate(whole)}
        elif isinstance(whole, dict):
            values |= _dotted(name, whole, deep=name == "annotations")
        elif form is not bool:
            values[name] = whole
    for key, value in values.items():
        findings += _check_value(key, value, environ, here)
    if "base_environment" in data:  # these may be inherited
        return findings
    if not data.get("image"):
        message = 'missing, so that no container is used: add image = "..."'
        findings.append(("warning", "image", message))
    # Without its complete network hook NCCL uses TCP, many times slower.
    cxi, nccl, variant = (values.get(f"annotations.{name}") for name in (_CXI, _NCCL, _VARIANT))
    if nccl == "true" and cxi != "true":  # some versions imply it
        severity = "error" if cxi else "warning"
        findings.append((severity, f"annotations.{_NCCL}", f'needs {_CXI} = "true"'))
    if variant and nccl != "true":  # "false" may be meant
        message = f'has no effect without {_NCCL} = "true": NCCL uses TCP'
        findings.append(("warning" if nccl else "error", f"annotations.{_VARIANT}", message))
    return findings


def _dotted(key: str, table: Mapping[str, Any], deep: bool) -> dict[str, Any]:
    """The values of a table by dotted keys; deep: com.hooks.x may be tables or one key."""
    values = dict[str, Any]()
    for name, part in table.items():
        at = f"{key}.{name}"
        values |= _dotted(at, part, deep) if deep and isinstance(part, dict) else {at: part}
    return values


def _check_value(key: str, value: Any, environ: Mapping[str, str], here: bool) -> Iterator[Finding]:
    """The findings on one value of a known key."""
    table, _, name = key.partition(".")
    of_ranks = name in RANK_VARIABLES or name.startswith(("SLURM_", "PMI_", "PMIX_"))
    if table == "env" and name in _FORMS:
        text = "is read as part of [env], whose header is above it: move it to the top"
        yield "error", key, text
    elif not isinstance(value, str):
        yield "error", key, "must be a string, within quotes"
    elif table == "env" and of_ranks:
        yield "error", key, "would be the same for every rank: remove it"
    elif key == "env.PYTHONPATH" and "${PYTHONPATH" not in value:
        yield "error", key, "hides run.sh's, so that jobkit is not found: add ${PYTHONPATH:-}"
    elif name.startswith(("com.hooks.", "com.pyxis.")) and name not in _ANNOTATIONS:
        yield "error", key, f"unknown annotation{nearest(name, _ANNOTATIONS)}"
    elif name == _REMAP and value == "true":
        yield "error", key, "sets RANK and LOCAL_RANK, which jobkit takes from Slurm: remove it"
    elif bare := re.search(r"(?<!\$)\$(\w+)", value):
        yield "error", key, f"'{bare[0]}' is not expanded: write ${{{bare[1]}}}"
    else:
        found = _VARIABLE.findall(value)
        for variable in (name for name, default in found if not default and name not in environ):
            severity = "error" if here and not variable.startswith("SLURM_") else "warning"
            fix = f"export it, or write ${{{variable}:-}} where it may be undefined"
            text = f"${{{variable}}} is not defined: {fix}{nearest(variable, environ)}"
            yield severity, key, text
            return
        path = _VARIABLE.sub(lambda m: environ.get(m[1]) or (m[2] or "")[2:], value)
        is_path = key == "image" and path.startswith(("/", "./"))  # else one of a registry
        path = path.partition(":")[0] if key.startswith("mounts") else path
        if here and (is_path or key.startswith("mounts")) and not is_there(Path(path)):
            yield "error", key, f"{path} does not exist"


@command
def edf_main(argv: Sequence[str] | None = None) -> int:
    """Check the files and print the findings; 2 where one is an error."""
    options = _parser(
        "check-edf",
        "an EDF",
        "Check environment definition files (EDF) of the CSCS container engine.",
        "edf.toml    as srun --environment=./edf.toml would see it",
    )
    options.add_argument(
        "--no-paths",
        action="store_true",
        help="the jobs run on another machine: check no path, and only warn of undefined ${VAR}",
    )
    args = options.parse_args(argv)
    return _report(args.files, lambda text: check_edf(text, os.environ, not args.no_paths))


# --- Kubernetes -------------------------------------------------------------------------------

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
        return [("error", "", "not valid YAML: " + " ".join(str(error).split())[:300])]
    except (AttributeError, KeyError, TypeError, ValueError):
        return [("error", "", "is no Job as Kubernetes reads it")]
    return findings if jobs else [("error", "", "has no Job")]


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
                yield "error", f"env.{place}", f"{env[place]} in every pod: use $({_INDEX})"
        given = any(place in env and env[place] is None for place in _PLACES)  # valueFrom
        if pods > 1 and not given and _INDEX not in line + values:
            fix = f"say --node-rank=$({_INDEX}), and write completionMode: Indexed"
            yield "error", "args", f"nothing tells a pod which node it is: {fix}"
        limits = (container.get("resources") or {}).get("limits") or {}
        gpus = sum(int(count) for resource, count in limits.items() if "/gpu" in resource)
        started, size = any(starter in line for starter in _STARTERS), env.get("WORLD_SIZE")
        if gpus > 1 and line and not started:
            fix = f"use torchrun --nproc-per-node={gpus}"
            yield "error", "command", f"starts one process for {gpus} GPUs: {fix}"
        if gpus and not started and size and int(size) != pods * gpus:
            text = f"{size}, and {pods} pods x {gpus} GPUs are {pods * gpus}"
            yield "error", "env.WORLD_SIZE", text
        option = re.search(r"--master[-_]addr[= ](\S+)", line)
        address = env.get("MASTER_ADDR") or (option[1] if option else None)
        if pods > 1 and address and "$(" not in address and address != first:
            yield "error", "env.MASTER_ADDR", f"no pod is called {address}: write {first}"


@command
def k8s_main(argv: Sequence[str] | None = None) -> int:
    """Check the files and print the findings; 2 where one is an error."""
    options = _parser(
        "check-k8s",
        "a file of manifests, in YAML or JSON",
        "Check that the pods of a Job become the ranks of one training; all else is for kubectl "
        "apply --dry-run=server.",
        "logs/strong/kubernetes/*.yaml",
    )
    return _report(options.parse_args(argv).files, check_k8s)
