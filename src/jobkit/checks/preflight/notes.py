"""What a preflight notes of GPUs and limits: it may slow a training down, or end a large one."""

from collections.abc import Sequence

from jobkit.checks.preflight.finding import CheckResult, Facts, by_host, grouped, many, where

_SOCKETS_PER_RANK = 3  # groups of Gloo, each of which connects a rank with every other
_OTHER_FILES = 256
_LEAST_SHM_MIB = 512  # a container's default is 64; NCCL has buffers there for each pair of ranks
_BUSY_WAIT = 0.5  # chosen: of the time a process waits for a core; the ranks' own starts are less
_STATES = {
    "driver": "driver",
    "gpu_max_clock": "maximum clock",
    "gpu_application_clock": "application clock",
    "gpu_power_limit": "power limit",
}


def gpu_notes(facts: Sequence[Facts]) -> CheckResult:
    """Return notes on GPUs that differ, have errors, or are far from the rank's cores."""
    found = CheckResult("gpu state", "no errors or differences reported")
    for key, name in _STATES.items():
        values = _by_state(facts, key)
        if len(values) > 1:
            text = "; ".join(f"{value}: {where(own)}" for value, own in values.items())
            found.notes.append(f"gpus: the {name} differs: {text}; the slowest limits all")
    for count, own in _by_state(facts, "gpu_ecc_errors").items():
        if count != "0":
            found.notes.append(
                f"gpus: {where(own)}: {count} uncorrected ECC errors since the driver was loaded: "
                "show the site, or leave the node out with --exclude"
            )
    for text, own in grouped(facts, lambda f: f.get("gpu_errors")).items():
        found.notes.append(f"gpus: {where(own)}: the kernel's log has {text}")
    far = [f for f in facts if f.get("gpu_cores") and not set(f["cores"]) & cpus(f["gpu_cores"])]
    if far:
        found.notes.append(
            f"gpus: {where(far)}: bound to cores of another socket than the GPU's: "
            "srun --cpu-bind, or --gpu-bind=closest"
        )
    return found


def _by_state(facts: Sequence[Facts], key: str) -> dict[str, list[Facts]]:
    return grouped(facts, lambda f: f.get("gpu_state", {}).get(key))


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


def binding_notes(facts: Sequence[Facts]) -> CheckResult:
    """Return notes on variables that bind the threads of all ranks of a node to the same cores."""
    found = CheckResult("bindings", "no variable binds the ranks of a node alike")
    for own in by_host(facts).values():
        for name in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"):
            for value, same in grouped(own, lambda f, n=name: _binding(f, n)).items():  # type: ignore[misc]
                if len(same) > 1 and _share_cores(same, value):
                    found.notes.append(
                        f"bindings: {where(same)}: {name}={value} binds the threads of each of "
                        "them to the same cores: unset it, and bind ranks with srun --cpu-bind"
                    )
    alone = [f for f in facts if f["gpus"] == 1 and f["local_world_size"] > 1]
    for value, own in grouped(alone, lambda f: _binding(f, "SLURM_GPU_BIND")).items():
        if value != "none":
            found.notes.append(
                f"bindings: {where(own)}: SLURM_GPU_BIND={value} shows each rank its own GPU only, "
                "so that NCCL may not use NVLink: --gpu-bind=none"
            )
    return found


def _binding(facts: Facts, name: str) -> str:
    value = facts.get("bindings", {}).get(name, "")
    idle = ("false", "disabled", "none", "norespect", "master", "primary")
    return "" if value.lower() in idle else str(value)


def _share_cores(facts: Sequence[Facts], value: str) -> bool:
    """Whether ranks with one value compute on the same cores: it names cores, or they share all.

    Abstract places such as `cores` begin at the first core that a process may use.
    """
    named = any(letter.isdigit() for letter in value)
    return named or len({tuple(f["cores"]) for f in facts}) < len(facts)


def busy(facts: Sequence[Facts], results: Sequence[Facts]) -> str:
    """Return which nodes were busy during what the ranks did together, and how; empty if none.

    Busy: a load above the node's cores, or a process that waits for a core half of the time.
    """
    cores = {f["host"]: f["machine_cores"] for f in facts}
    texts = []
    for host, own in by_host(results).items():
        load = max(r.get("load", 0.0) for r in own)
        waits = max(r.get("core_wait_share", 0.0) for r in own)
        if host in cores and (load > cores[host] or waits >= _BUSY_WAIT):
            text = f"{host} was busy: load {load:.1f} on {many(cores[host], 'core')}"
            text += f", a process waited for a core {waits:.0%} of the time" if waits else ""
            texts.append(text)
    return "; ".join(texts[:4]) + "; ..." * (len(texts) > 4)
