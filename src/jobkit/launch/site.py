"""Site profiles: what one cluster wants to be told, read from hpc/sites/*.toml.

name = "example"
clusters = ["alps"]          # ClusterName of its Slurm, by which this file is found
partition = "normal"
time = "00:30:00"
gpus_per_node = 4
setup = ["source .venv/bin/activate"]
[env]
NCCL_DEBUG = "WARN"
"""

import re
import shlex
import sys
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jobkit.errors import Exit, UsageError, nearest, one_of
from jobkit.files import read_text
from jobkit.paths import REPOSITORY, check_name, find_named

SITES = REPOSITORY / "hpc" / "sites"
GPU_REQUESTS = ("gpus-per-node", "gres", "gpus-per-task", "none")
CONTAINERS = ("none", "edf", "pyxis", "apptainer")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Site:
    """One cluster's ways. Raises UsageError, naming the key, for a value that cannot be used."""

    name: str
    description: str = ""
    clusters: tuple[str, ...] = ()  # ClusterName of its Slurm
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: str = "00:30:00"  # limit of one run
    exclusive: bool = False
    mem: str | None = None  # on each node
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None  # a rank a GPU: no node takes more ranks
    gpu_request: str = "gpus-per-node"  # how GPUs are asked for; none: nodes come whole
    gpu_type: str | None = None
    setup: tuple[str, ...] = ()  # shell commands before the launch: module load, source ...
    env: Mapping[str, str] = field(default_factory=dict)
    container: str = "none"
    image: str | None = None  # edf: file or name; pyxis, apptainer: the image
    mounts: tuple[str, ...] = ()  # pyxis, apptainer: SRC:DST
    python: str | None = None  # how Python is called on the compute nodes (default: python)
    interface: str | None = None  # network interface for NCCL and Gloo
    interface_suffix: str | None = None  # added to rank 0's host name, for the fast network
    sbatch: tuple[str, ...] = ()  # more options of sbatch, as they are

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f.name, getattr(self, f.name)))
        check_name("site name", self.name)
        one_of("gpu_request", self.gpu_request, GPU_REQUESTS)
        one_of("container", self.container, CONTAINERS)
        minutes(self.time)
        for name in self.env:
            if not _ENV_NAME.fullmatch(name):
                raise UsageError(f"env {name!r}: is no name of an environment variable")
        if self.container != "none" and not self.image:
            raise UsageError(f"container '{self.container}' needs image = ...")
        for key in ("cpus_per_task", "gpus_per_node"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise UsageError(f"{key} = {value}: must be 1 or more")

    @classmethod
    def load(cls, source: str | Path) -> "Site":
        """Read a profile from a TOML file, or by its bare name from hpc/sites.

        Raises UsageError for a missing or broken file, or an unknown key (with the nearest one).
        """
        path = find_named("site", source, SITES, ("local", "slurm"))
        try:
            values = tomllib.loads(read_text(path))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise UsageError(f"{path}: not valid TOML: {error}") from None
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise UsageError(f"{path}: unknown key '{key}'{nearest(key, known)}")
        try:
            return cls(**{"name": path.stem, **values})
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    def shell(self) -> str:
        """What run.sh sources before the launch: environment, set-up lines, container."""
        lines = [f"# site profile {self.name}"]
        env = dict(self.env)
        if self.interface:
            env |= {"NCCL_SOCKET_IFNAME": self.interface, "GLOO_SOCKET_IFNAME": self.interface}
        if self.interface_suffix:
            env["JOBKIT_INTERFACE_SUFFIX"] = self.interface_suffix
        lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        for line in self.setup:
            why = shlex.quote(f"site {self.name}: set-up line failed: {line}")
            lines.append(f"{{ {line}\n}} || fail {why} 1")
        # The Python of the login node is not there in a container, nor the one that is set up.
        elsewhere = self.container != "none" or bool(self.setup)
        if python := self.python or ("python" if elsewhere else None):
            lines.append(f"JOBKIT_PYTHON={shlex.quote(python)}")
        lines.append(f"srun_options=({shlex.join(self._srun_options())})")
        lines.append(f"inside=({shlex.join(self._inside())})")
        return "\n".join(lines) + "\n"

    def _srun_options(self) -> list[str]:
        """Options of srun that start each task in the container."""
        if self.container == "edf":
            return [f"--environment={self._edf()}"]
        if self.container == "pyxis":
            mounts = [f"--container-mounts={','.join(self.mounts)}"] if self.mounts else []
            return [f"--container-image={self.image}", *mounts]
        return []

    def _edf(self) -> str:
        """An absolute path for a file; a bare name is looked up by the container engine."""
        assert self.image
        is_file = "/" in self.image or self.image.endswith(".toml")
        return str((REPOSITORY / self.image).resolve()) if is_file else self.image

    def _inside(self) -> list[str]:
        """The words that come before python within each task."""
        if self.container != "apptainer":
            return []
        binds = [word for mount in self.mounts for word in ("--bind", mount)]
        assert self.image
        return ["apptainer", "exec", "--nv", *binds, self.image]


_HINTS = typing.get_type_hints(Site)


def _checked(name: str, value: Any) -> Any:
    """The value as the type of its field; UsageError says what it must be."""
    hint = _HINTS[name]
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    kind = typing.get_origin(hint) or hint
    if kind is tuple:
        if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
        raise UsageError(f"{name} = {value!r}: must be a list of texts")
    if kind is Mapping:
        if isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values()):
            return dict(value)
        raise UsageError(f"[{name}] must be a table of texts, not {value!r}")
    if type(value) is not kind:
        words = {str: "a text", int: "a whole number", bool: "true or false"}
        raise UsageError(f"{name} = {value!r}: must be {words[kind]}")
    if kind is str and re.search(r"[\x00-\x1f\x7f]", value):
        raise UsageError(f"{name} = {value!r}: has a control character")
    return value


def known_sites() -> list[str]:
    """Names of the profiles in hpc/sites."""
    return sorted(p.stem for p in SITES.glob("*.toml"))


def site_of_cluster(cluster: str) -> Site:
    """The profile that names the cluster, else one that asks for nothing in particular."""
    for name in known_sites():
        if cluster in (site := Site.load(name)).clusters:
            return site
    return Site(name=re.sub(r"[^A-Za-z0-9._-]", "-", cluster) or "slurm")


def minutes(text: str) -> float:
    """A time limit of Slurm's in minutes. Raises UsageError for a text that is none.

    Forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S (man sbatch, --time).
    """
    match = _TIME.fullmatch(text)
    if not match or (match[1] is None and match[2] and int(match[2]) == 0 and not match[3]):
        raise UsageError(
            f"time {text!r}: must be minutes, HH:MM:SS or D-HH:MM:SS, as 30 or 01:30:00"
        )
    days, a, b, c = (int(word or 0) for word in match.groups())
    if match[1] is not None:
        total = days * 1440.0 + a * 60 + b + c / 60
    elif match[4] is not None:
        total = a * 60 + b + c / 60
    else:
        total = a + b / 60
    if not total:
        raise UsageError(f"time {text!r}: is no time at all")
    return total


def main(argv: list[str]) -> int:
    """Print what run.sh sources for a site: `python -m jobkit.launch.site NAME`."""
    try:
        sys.stdout.write(Site.load(argv[0]).shell())
    except UsageError as error:
        print(f"jobkit: error: {error}", file=sys.stderr)
        return Exit.USAGE
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
