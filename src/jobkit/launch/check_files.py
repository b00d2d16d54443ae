"""Checks of a user's files before a job waits in a queue with them: check-edf and check-k8s.

An EDF is an environment definition file of the CSCS container engine. A mistake in one is found
when the job starts; and without its network hook a job is slow, not wrong. Of a Job of Kubernetes
five rules are checked which no schema has: that its pods become the ranks of one training.
"""

import json
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobkit.errors import Exit, Parser, command, nearest
from jobkit.files import MAX_TOML, load_toml, read_text
from jobkit.launch.command import RANK_VARIABLES


@dataclass(frozen=True)
class Finding:
    """One mistake, and how to correct it."""

    severity: str  # error: it would not start, or not as meant; warning: it may be meant
    key: str  # such as mounts[1] or env.RANK; empty: the whole file
    message: str


class Findings(list[Finding]):
    """The findings on one file."""

    def error(self, key: str, message: str) -> None:
        """Add an error."""
        self.append(Finding("error", key, message))

    def warn(self, key: str, message: str) -> None:
        """Add a warning."""
        self.append(Finding("warning", key, message))


def _report(args: Namespace, check: Callable[[str], list[Finding]]) -> int:
    """Check each file's text, print the findings; 2 where one is an error."""
    rows = []
    for name in dict.fromkeys(args.files):
        try:
            findings = check(read_text(name, MAX_TOML))
        except OSError as error:
            findings = [Finding("error", "", f"cannot be read: {error.strerror}")]
        except ValueError:  # not UTF-8, or a NUL in the name
            findings = [Finding("error", "", "is no text in UTF-8")]
        rows += [{"file": name, **asdict(finding)} for finding in dict.fromkeys(findings)]
    errors = sum(row["severity"] == "error" for row in rows)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            text = ": ".join(filter(None, row.values()))
            # Values of the file may hold control characters.
            print("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))
        print(f"files: {len(set(args.files))}, errors: {errors}, warnings: {len(rows) - errors}")
    return Exit.USAGE if errors else Exit.OK


def _parser(name: str, what: str, description: str, example: str) -> ArgumentParser:
    """The command line of a check of files."""
    options = Parser(
        prog=f"jobkit {name}",
        description=description,
        epilog=f"example:\n  python -m jobkit {name} {example}\n\n"
        "exit codes: 0 no error (warnings are no error); 2 an error in a file, or no such file",
    )
    options.add_argument("files", nargs="+", metavar="FILE", help=what)
    options.add_argument("--json", action="store_true", help="print the findings as JSON")
    return options


# --- EDF --------------------------------------------------------------------------------------

_TYPES: dict[str, tuple[type, ...]] = {
    "base_environment": (str, list),
    "image": (str,),
    "workdir": (str,),
    "entrypoint": (bool,),
    "writable": (bool,),
    "mounts": (list,),
    "devices": (list,),
    "env": (dict,),
    "annotations": (dict,),
}
_TYPE_NAMES = {
    str: "a string",
    bool: "true or false (without quotes)",
    list: "an array of strings",
    dict: "a table",
}
_CXI, _NCCL = "com.hooks.cxi.enabled", "com.hooks.aws_ofi_nccl.enabled"
_VARIANT, _REMAP = "com.hooks.aws_ofi_nccl.variant", "com.pyxis.pytorch_remap_vars"
_SWITCHES = (
    *(_CXI, _NCCL, _REMAP, "com.pyxis.entrypoint_log", "com.hooks.ssh.enabled"),
    *("com.hooks.nvidia_cuda_mps.enabled", "com.hooks.dcgm.enabled", "com.hooks.slurm.enabled"),
)
_ANNOTATIONS = (
    *(*_SWITCHES, _VARIANT, "com.hooks.ssh.authorize_ssh_key", "com.hooks.ssh.port"),
    *("com.hooks.netstack.source", "com.hooks.netstack.version", "com.hooks.netstack.name"),
)
# $$ | ${NAME} | ${NAME:-default} | a $ that starts none of them
_DOLLAR = re.compile(r"\$(?:\$|\{([A-Za-z_]\w*)(?::-([^}]*))?\}|([A-Za-z_]\w*)?)", re.ASCII)


class _Edf(Findings):
    """The findings on an EDF as srun, called here with this environment, would read it."""

    def __init__(self, environ: Mapping[str, str], here: bool) -> None:
        super().__init__()
        self._environ, self._here = environ, here

    def check(self, data: dict[str, Any]) -> None:
        """Check each key by its rule, then what the network hooks need together."""
        for key, value in data.items():
            if key not in _TYPES:
                known = ", ".join(_TYPES)
                self.error(key, f"unknown key{nearest(key, _TYPES)} (known: {known})")
            elif not isinstance(value, _TYPES[key]):
                names = " or ".join(_TYPE_NAMES[kind] for kind in _TYPES[key])
                self.error(key, f"must be {names}")
            elif rule := getattr(self, f"_check_{key}", None):
                rule(value)
        if "base_environment" in data:  # these may be inherited
            return
        if not data.get("image"):
            self.warn("image", 'missing, so that no container is used: add image = "..."')
        table = data.get("annotations", {})
        self._check_hooks(dict(_flat(table, "")) if isinstance(table, dict) else {})

    def _expand(self, key: str, value: Any) -> str | None:
        """The value with its variables replaced; None, with findings, where that fails."""
        if not isinstance(value, str):
            self.error(key, "must be a string, within quotes")
            return None
        before = len(self)
        text = _DOLLAR.sub(lambda match: self._variable(key, match), value)
        return text if len(self) == before else None

    def _variable(self, key: str, match: re.Match[str]) -> str:
        name, default, bare = match.groups()
        if match[0] == "$$":
            return "$"
        if name is None:
            fix = f"${{{bare}}}" if bare else "${VAR} or ${VAR:-default}, or $$ for a dollar sign"
            self.error(key, f"'{match[0]}' is not expanded: write {fix}")
        elif name not in self._environ and default is None:
            add = self.error if self._here and not name.startswith("SLURM_") else self.warn
            fix = f"export it, or write ${{{name}:-}} where it may be undefined"
            add(key, f"${{{name}}} is not defined: {fix}{nearest(name, self._environ)}")
        return self._environ.get(name or "") or default or ""

    def _is_missing(self, path: str) -> bool:
        try:
            return self._here and not Path(path).exists()
        except (OSError, ValueError):  # a name too long, a NUL, a folder without access
            return True

    def _check_image(self, value: str) -> None:
        image = self._expand("image", value) or ""
        if image.startswith(("/", "./")) and self._is_missing(image):
            self.error("image", f"{image} does not exist: make it with 'enroot import'")
        elif image.endswith((".sqsh", ".squashfs")) and not image.startswith(("/", "./")):
            self.error("image", f"{image} is taken for an image of a registry: write ./{image}")

    def _check_workdir(self, value: str) -> None:
        path = self._expand("workdir", value)
        if path is not None and not path.startswith("/"):
            fix = "write an absolute path, or ${PWD} for where srun is called"
            self.error("workdir", f"'{path}' is relative: {fix}")

    def _check_mounts(self, values: list[Any]) -> None:
        for index, value in enumerate(values):
            key = f"mounts[{index}]"
            if (mount := self._expand(key, value)) is None:
                continue
            source, *more = parts = mount.split(":")
            if len(parts) not in (2, 3) or not all(parts):
                self.error(key, f"'{mount}' is not SOURCE:DESTINATION or SOURCE:DESTINATION:FLAGS")
                continue
            if not source.startswith(("/", "./")):
                self.error(key, f"source '{source}' is no path: write /{source} or ./{source}")
            elif self._is_missing(source):
                self.error(key, f"source {source} does not exist")
            if not more[0].startswith("/"):
                self.error(key, f"'{mount}': the destination must be an absolute path")

    def _check_env(self, table: dict[str, Any]) -> None:
        for name, value in table.items():
            key = f"env.{name}"
            if name in _TYPES:
                header = "whose header is above it: move it to the top"
                self.error(key, f"is read as part of [env], {header}")
            elif name in RANK_VARIABLES or name.startswith(("SLURM_", "PMI_", "PMIX_")):
                self.error(key, "would be the same for every rank: remove it")
            elif name == "PYTHONPATH" and "${PYTHONPATH" not in str(value):
                self.error(key, "hides run.sh's, so that jobkit is not found: add ${PYTHONPATH:-}")
            else:
                self._expand(key, value)

    def _check_annotations(self, table: dict[str, Any]) -> None:
        for name, value in _flat(table, ""):
            key = f"annotations.{name}"
            if name not in _ANNOTATIONS:
                if name.startswith(("com.hooks.", "com.pyxis.")):
                    self.error(key, f"unknown annotation{nearest(name, _ANNOTATIONS)}")
                continue
            text = self._expand(key, value)
            if text is not None and name in _SWITCHES and text not in ("true", "false"):
                self.error(key, f'\'{text}\' must be "true" or "false"')
            elif name == _REMAP and text == "true":
                self.error(
                    key, "sets RANK and LOCAL_RANK, which jobkit takes from Slurm: remove it"
                )

    def _check_hooks(self, notes: dict[str, Any]) -> None:
        """Without its complete network hook NCCL uses TCP, many times slower."""
        if notes.get(_NCCL) == "true" and notes.get(_CXI) != "true":
            add = self.error if _CXI in notes else self.warn  # some versions imply it
            add(f"annotations.{_NCCL}", f'needs {_CXI} = "true"')
        if _VARIANT in notes and notes.get(_NCCL) != "true":
            add = self.warn if _NCCL in notes else self.error  # "false" may be meant
            add(f"annotations.{_VARIANT}", f'has no effect without {_NCCL} = "true": NCCL uses TCP')


def _flat(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Each annotation by its dotted name: com.hooks.x may be tables, dotted keys or one key."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def check_edf(text: str, environ: Mapping[str, str], here: bool = True) -> list[Finding]:
    """The findings on the text of an EDF. Relative paths start in the current folder.

    here: False when the jobs run on another machine, so that paths are not checked and an undefined
    variable is only a warning.
    """
    findings = _Edf(environ, here)
    try:
        findings.check(load_toml(text))
    except ValueError as error:
        findings.error("", f"not valid TOML: {error}")
    return findings


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
    return _report(args, lambda text: check_edf(text, os.environ, not args.no_paths))


# --- Kubernetes -------------------------------------------------------------------------------

_INDEX = "JOB_COMPLETION_INDEX"
_PLACES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "PET_NODE_RANK")
_STARTERS = ("torchrun", "torch.distributed.run", "run.sh", "accelerate", "deepspeed", "mpirun")


def check_k8s(text: str) -> list[Finding]:
    """The findings on the text of a file with one or more manifests."""
    import yaml  # --help needs none

    findings = Findings()
    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        findings.error("", "not valid YAML: " + " ".join(str(error).split())[:300])
        return findings
    jobs = [document for document in documents if _at(document, "kind") == "Job"]
    if not jobs:
        findings.error("", "has no Job")
    for job in jobs:
        for container in _list(job, "spec", "template", "spec", "containers"):
            _check_ranks(job, container, findings)
    return findings


def _at(value: Any, *keys: str) -> Any:
    """What is under the keys; None where one is missing or its holder is no mapping."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _list(value: Any, *keys: str) -> list[Any]:
    values = _at(value, *keys)
    return values if isinstance(values, list) else []


def _check_ranks(job: Any, container: Any, findings: Findings) -> None:
    """How the ranks of a container learn their places."""
    name, pods = _at(job, "metadata", "name"), _at(job, "spec", "parallelism")
    pods = pods if type(pods) is int else 1
    env = {str(_at(v, "name")): _at(v, "value") for v in _list(container, "env")}
    words = [str(w) for w in (*_list(container, "command"), *_list(container, "args"))]
    started = any(starter in " ".join(words) for starter in _STARTERS)
    for place in _PLACES:
        if pods > 1 and isinstance(env.get(place), str) and "$(" not in env[place]:
            findings.error(f"env.{place}", f"{env[place]} in every pod: use $({_INDEX})")
    by_index = _INDEX in " ".join(map(str, (*words, *env.values())))
    by_index = by_index or any(p in env and env[p] is None for p in _PLACES)  # valueFrom
    if pods > 1 and not by_index:
        findings.error(
            "args", f"nothing tells a pod which node it is: say --node-rank=$({_INDEX}), and write "
            "completionMode: Indexed"
        )  # fmt: skip
    limits = _at(container, "resources", "limits")
    counts = limits.items() if isinstance(limits, Mapping) else ()
    gpus = sum(int(n) for r, n in counts if "/gpu" in str(r) and re.fullmatch("[0-9]{1,3}", str(n)))
    if gpus > 1 and words and not started:
        findings.error(
            "command", f"starts one process for {gpus} GPUs: use torchrun --nproc-per-node={gpus}"
        )
    size = env.get("WORLD_SIZE")
    if started and size is not None:
        findings.warn("env.WORLD_SIZE", "the launcher sets it: remove it")
    elif gpus and re.fullmatch("[0-9]{1,9}", str(size)) and int(str(size)) != pods * gpus:
        findings.error("env.WORLD_SIZE", f"{size}, and {pods} pods x {gpus} GPUs are {pods * gpus}")
    first = f"{name}-0.{_at(job, 'spec', 'template', 'spec', 'subdomain') or name}"
    address = env.get("MASTER_ADDR")
    for word, value in zip(words, [*words[1:], ""], strict=False):
        option, equals, given = word.partition("=")
        if address is None and option in ("--master-addr", "--master_addr"):
            address = given if equals else value
    if pods > 1 and isinstance(address, str) and "$(" not in address and address != first:
        findings.error("env.MASTER_ADDR", f"no pod is called {address}: write {first}")


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
    return _report(options.parse_args(argv), check_k8s)
