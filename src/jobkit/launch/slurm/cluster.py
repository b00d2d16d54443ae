"""Which cluster this is: asks Slurm for its name, within a bound of time."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.launch.site import Site, site_of_cluster

TIMEOUT_S = 30.0
_NOT_SET_UP = re.compile(r"configuration source|DNS SRV|Unable to open|slurm\.conf", re.IGNORECASE)
_CLUSTER = re.compile(r"^\s*ClusterName\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)


def find_site(given: str | None, ask: bool = True) -> Site | None:
    """The site that was named, else the one of this cluster; None: this machine, without Slurm.

    ask: Slurm may be asked; a dry run goes by its configuration file alone. Raises UsageError
    where Slurm was asked for and is absent, or is here and does not answer.
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
        cluster = "slurm"  # its name lies in another file, or with the controller
    if cluster is None and given is None:
        return None  # Slurm's commands are installed, and no cluster is set up for them
    if cluster is None and ask:
        raise UsageError("--site slurm: Slurm is installed here, but no cluster is set up for it")
    return site_of_cluster(cluster or "slurm")


def configurations() -> list[Path]:
    """Where Slurm's configuration may lie on this machine."""
    if given := os.environ.get("SLURM_CONF"):
        return [Path(given)]
    return [Path("/etc/slurm/slurm.conf"), Path("/run/slurm/conf/slurm.conf")]


def configured_name() -> str | None:
    """The cluster's name in Slurm's configuration file, where there is one to read."""
    for path in configurations():
        try:
            match = _CLUSTER.search(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if match:
            return match[1]
    return None


def cluster_name() -> str | None:
    """The cluster's name; None where Slurm's commands have no cluster at all.

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
    said = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    raise UsageError(
        f"Slurm's controller does not answer ({said}): try again later, or use --site local"
    )
