"""Finds the site of this machine from the name of its cluster."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.launch.site import Site, site_of_cluster

TIMEOUT_S = 30.0
_NOT_SET_UP = re.compile(r"configuration source|DNS SRV|Unable to open|slurm\.conf", re.IGNORECASE)
_ARRAY = re.compile(r"^\s*MaxArraySize\s*=\s*([0-9]{1,9})\b", re.MULTILINE | re.IGNORECASE)
_MAX_ARRAY_SIZE = 1001  # Slurm's default
_CLUSTER = re.compile(r"^\s*ClusterName\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)


def find_site(given: str | None, ask: bool = True) -> Site | None:
    """The given site, else this cluster's; None: this machine, without Slurm.

    ask: Slurm may be asked; a dry run reads its configuration file only. Raises UsageError
    where Slurm was requested and is absent, or is installed and does not answer.
    """
    if given == "local":
        return None
    here = shutil.which("sbatch") is not None
    if given is not None and ask and not here:
        raise UsageError(
            f"--site {given}: no 'sbatch' on PATH here; log in to the cluster, "
            "or use --site local for this machine"
        )
    if given not in (None, "slurm"):
        return Site.load(given)
    if given is None and not here:
        return None
    cluster = configured_name() or (cluster_name() if ask else None)
    if cluster is None and not ask and any(path.exists() for path in configurations()):
        cluster = "slurm"  # only the controller knows its name
    if cluster is None and given is None:
        return None  # Slurm's commands are installed without a cluster
    if cluster is None and ask:
        raise UsageError(
            "--site slurm: Slurm is installed on this machine, but no cluster is configured"
        )
    return site_of_cluster(cluster or "slurm")


def configurations() -> list[Path]:
    """Possible paths of Slurm's configuration on this machine."""
    if given := os.environ.get("SLURM_CONF"):
        return [Path(given)]
    return [Path("/etc/slurm/slurm.conf"), Path("/run/slurm/conf/slurm.conf")]


def configured_name() -> str | None:
    """The cluster's name in Slurm's configuration file; None without a readable one."""
    return _configured(_CLUSTER)


def max_array_size() -> int:
    """How many elements an array may have, by Slurm's configuration file, else by its default."""
    return max(1, int(_configured(_ARRAY) or _MAX_ARRAY_SIZE))


def _configured(value: re.Pattern[str]) -> str | None:
    """What an expression finds first in Slurm's configuration files."""
    for path in configurations():
        try:
            match = value.search(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if match:
            return match[1]
    return None


def cluster_name() -> str | None:
    """The cluster's name, as its controller says; None without a configured cluster.

    Raises UsageError where the controller does not answer.
    """
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"Slurm's controller did not answer within {TIMEOUT_S:.0f} s: "
            "try again later, or use --site local"
        ) from None
    if match := _CLUSTER.search(done.stdout):
        return match[1]
    if _NOT_SET_UP.search(done.stderr):
        return None
    reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    raise UsageError(
        f"Slurm's controller does not answer ({reason}): try again later, or use --site local"
    )
