"""What a preflight notes of GPUs and limits: it may slow a training down, or end a large one."""

from collections.abc import Sequence

from jobkit.checks.preflight.finding import CheckResult, Facts, where

_SOCKETS_PER_RANK = 3  # groups of Gloo, each of which connects a rank with every other
_OTHER_FILES = 256
_LEAST_SHM_MIB = 512  # a container's default is 64; NCCL has buffers there for each pair of ranks


def gpu_notes(facts: Sequence[Facts]) -> CheckResult:
    """Return a note on GPUs that are far from the rank's cores."""
    found = CheckResult("gpu cores", "no rank is bound to cores of another socket than its GPU's")
    far = [f for f in facts if f.get("gpu_cores") and not set(f["cores"]) & cpus(f["gpu_cores"])]
    if far:
        found.notes.append(
            f"gpus: {where(far)}: bound to cores of another socket than the GPU's: "
            "srun --cpu-bind, or --gpu-bind=closest"
        )
    return found


def cpus(text: str) -> set[int]:
    """Return the numbers of a kernel's list such as 0-3,8."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def limit_notes(facts: Sequence[Facts]) -> CheckResult:
    """Return notes on limits of the processes that a training of this size runs into."""
    found = CheckResult("limits", "open files, shared and locked memory")
    needed = _SOCKETS_PER_RANK * len(facts) + _OTHER_FILES
    few = [f for f in facts if 0 <= f.get("open_files", -1) < needed]
    if few:
        least = min(f["open_files"] for f in few)
        found.notes.append(
            f"limits: {where(few)}: {least} open files, and {len(facts)} ranks need about {needed} "
            "each: ulimit -n"
        )
    on_gpus = [f for f in facts if f["gpus"]]
    several = [f for f in on_gpus if f["local_world_size"] > 1]
    small = [f for f in several if 0 <= f.get("shm_mib", -1) < _LEAST_SHM_MIB]
    if small:
        least = min(f["shm_mib"] for f in small)
        found.notes.append(
            f"limits: {where(small)}: {least} MiB free in /dev/shm, where NCCL exchanges between "
            "ranks of a node: give the container more (docker: --shm-size, --ipc=host)"
        )
    locked = [f for f in on_gpus if f.get("memlock_mib", -1) >= 0 and len(facts[0]["nodes"]) > 1]
    if locked:
        found.notes.append(
            f"limits: {where(locked)}: locked memory is limited to {locked[0]['memlock_mib']} MiB, "
            "which RDMA needs unlimited: ulimit -l, or the container's --ulimit memlock=-1"
        )
    return found
