"""Settings of one cluster, from hpc/sites/*.toml: of these files example.toml has every key."""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from jobkit.errors import Exit, UsageError, command
from jobkit.files import read_toml
from jobkit.gpus import VENDORS
from jobkit.paths import REPOSITORY, check_name, find_named, short_path
from jobkit.spec.settings import check_fields, setting

SITES = REPOSITORY / "hpc" / "sites"
GPU_REQUESTS = ("gpus-per-node", "gres", "none")
CONTAINERS = ("none", "edf", "pyxis", "apptainer")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The settings of one cluster. Raises UsageError, naming the key, for an invalid value."""

    name: str
    clusters: tuple[str, ...] = ()  # ClusterName of its Slurm
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: str = "00:30:00"  # time limit of one run
    exclusive: bool = False
    mem: str | None = None  # per node
    cpus_per_task: int | None = setting(None, "CPU cores per rank", low=1)
    # One rank per GPU: no node takes more ranks.
    gpus_per_node: int | None = setting(None, "GPUs, and ranks at most, per node", low=1)
    gpu_request: str = setting(
        "gpus-per-node", "how GPUs are requested; none: whole nodes", choices=GPU_REQUESTS
    )
    gpu_type: str | None = None
    gpu_vendor: str = setting("nvidia", "maker of the GPUs", choices=tuple(VENDORS))
    setup: tuple[str, ...] = ()  # shell commands before the launch: module load, source ...
    env: Mapping[str, str] = field(default_factory=dict)
    container: str = setting("none", "how each rank is started", choices=CONTAINERS)
    image: str | None = None  # edf: file or name; pyxis, apptainer: the image
    mounts: tuple[str, ...] = ()  # pyxis, apptainer: SRC:DST
    python: str | None = None  # Python on the compute nodes (default: python)
    interface: str | None = None  # network interface for NCCL and Gloo
    interface_suffix: str | None = None  # appended to rank 0's host name, for the fast network
    sbatch: tuple[str, ...] = ()  # more options, passed through to sbatch
    source: str = ""  # its file, which has no such key; empty: none, but the defaults

    def __post_init__(self) -> None:
        check_name("site name", self.name)
        check_fields(self)
        minutes(self.time)
        for name in self.env:
            if not _ENV_NAME.fullmatch(name):
                raise UsageError(f"env {name!r}: is not a name of an environment variable")
        for line in self.setup:
            words = ["bash", "-n", "-c", f"{{ {line}\n}}"]  # as in shell()
            checked = subprocess.run(words, capture_output=True, text=True)
            if checked.returncode:
                why = re.sub(r".*?: line \d+: ", "", checked.stderr.partition("\n")[0])
                raise UsageError(f"setup {line!r}: {why}: write each command or block in one line")
        if self.container != "none" and not self.image:
            raise UsageError(f"container '{self.container}' needs image = ...")
        for name in ("image", *(("python",) if self.python else ())):
            if str(getattr(self, name) or "").startswith("-"):
                raise UsageError(f"{name} {getattr(self, name)!r}: begins as an option does")

    @classmethod
    def load(cls, source: str | Path) -> "Site":
        """The settings in a TOML file, given by its path or by its bare name in hpc/sites.

        Raises UsageError for a missing or invalid file, or an unknown key (with the nearest one).
        """
        path = find_named("site", source, SITES, ("local", "slurm"))
        values = read_toml(path, [f.name for f in fields(cls) if f.name != "source"])
        try:
            return cls(**{"name": path.stem, **values, "source": short_path(path)})
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    def shell(self) -> str:
        """The shell code that run.sh sources: environment, setup commands, container."""
        lines = [f"# site {self.name}"]
        own = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), self.interface)
        own |= {"JOBKIT_INTERFACE_SUFFIX": self.interface_suffix}
        env = {**self.env, **{name: value for name, value in own.items() if value}}
        lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        for line in self.setup:
            why = shlex.quote(f"site {self.name}: setup command failed: {line}")
            lines.append(f"{{ {line}\n}} || fail {why} 1")
        # Neither a container nor the setup commands provide the login node's Python.
        elsewhere = self.container != "none" or bool(self.setup)
        if python := self.python or ("python" if elsewhere else None):
            lines.append(f"JOBKIT_PYTHON={shlex.quote(python)}")
        srun, inside = [], []  # options of srun; what comes before python within each task
        if self.container == "edf":
            image = str(self.image)  # a file, or a name that the container engine looks up
            is_file = "/" in image or image.endswith(".toml")
            srun = [f"--environment={(REPOSITORY / image).resolve() if is_file else image}"]
        elif self.container == "pyxis":
            srun = [f"--container-image={self.image}"]
            srun += [f"--container-mounts={','.join(self.mounts)}"] if self.mounts else []
        elif self.container == "apptainer":
            binds = [word for mount in self.mounts for word in ("--bind", mount)]
            gpus = VENDORS[self.gpu_vendor].apptainer
            inside = ["apptainer", "exec", gpus, *binds, str(self.image)]
        lines.append(f"srun_options=({shlex.join(srun)})")
        lines.append(f"inside=({shlex.join(inside)})")
        return "\n".join(lines) + "\n"


def known_sites() -> list[str]:
    return sorted(p.stem for p in SITES.glob("*.toml"))


def site_of_cluster(cluster: str) -> Site:
    """The site that names the cluster, else one with the defaults."""
    sites = [site for name in known_sites() if cluster in (site := Site.load(name)).clusters]
    if len(sites) > 1:
        files = " and ".join(site.source for site in sites)
        raise UsageError(f"{files} are both for cluster {cluster}: name one with --site")
    return sites[0] if sites else Site(name=re.sub(r"[^A-Za-z0-9._-]", "-", cluster) or "slurm")


def minutes(text: str) -> float:
    """A time limit in Slurm's format, in minutes. Raises UsageError for any other text.

    Forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S (man sbatch, --time).
    """
    total, match = 0.0, _TIME.fullmatch(text)
    if match:
        days, a, b, c = (int(word or 0) for word in match.groups())
        has_hours = match[1] is not None or match[4] is not None
        total = days * 1440.0 + a * 60 + b + c / 60 if has_hours else a + b / 60
    if not total:
        forms = "minutes, HH:MM:SS or D-HH:MM:SS, as 30 or 01:30:00"
        raise UsageError(f"time {text!r}: must be {forms}")
    return total


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print what run.sh sources for a site: `python -m jobkit.launch.site NAME`."""
    (source,) = sys.argv[1:] if argv is None else argv
    sys.stdout.write(Site.load(source).shell())
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
