"""Rank and size of a process in a Slurm step, from Slurm's variables: no scontrol needed."""

import re
from collections.abc import Mapping
from typing import Any

from jobkit.errors import UsageError

_MOST = 1_000_000  # nodes of a job
_EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"


def expand_nodes(text: str) -> list[str]:
    """Expand a Slurm node list, such as 'n[1-3,07-08],gpu[1-2]-ib', into names in order.

    Raises ValueError for text that is not one.
    """
    names: list[str] = []
    for group in _split(text):
        names += _expand_group(group)
        if len(names) > _MOST:
            raise ValueError(f"more than {_MOST:,} nodes: {text!r}")
    return names


def _split(text: str) -> list[str]:
    """Split at the commas that stand outside brackets."""
    groups, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"not a node list: {text!r}")
        if char == "," and depth == 0:
            groups.append(text[start:at])
            start = at + 1
    groups.append(text[start:])
    if depth or not all(groups):
        raise ValueError(f"not a node list: {text!r}")
    return groups


def _expand_group(group: str) -> list[str]:
    """Expand one group; the leftmost bracket varies slowest, and zero padding is kept."""
    match = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]+)\](.*))?", group)
    if not match:
        raise ValueError(f"not a node list: {group!r}")
    head, ranges, tail = match.groups()
    if ranges is None:
        return [head]
    tails = _expand_group(tail)
    names: list[str] = []
    for part in ranges.split(","):
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not numbers:
            raise ValueError(f"not a node list: {group!r}")
        first, last = numbers[1], numbers[2] or numbers[1]
        if (int(last) - int(first) + 1) * len(tails) + len(names) > _MOST:
            raise ValueError(f"more than {_MOST:,} nodes: {group!r}")
        for number in range(int(first), int(last) + 1):
            names += [f"{head}{number:0{len(first)}d}{end}" for end in tails]
    return names


def tasks_per_node(text: str) -> list[int]:
    """Expand SLURM_STEP_TASKS_PER_NODE, such as '4(x2),3', into a count for each node."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"not a list of tasks: {text!r}")
        if int(match[2] or 1) + len(counts) > _MOST:
            raise ValueError(f"more than {_MOST:,} nodes: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def default_port(job_id: int, restart: int, ephemeral: tuple[int, int]) -> int:
    """A port derived from the job id, outside the system's range of ephemeral ports."""
    low, high = ephemeral
    below, above = range(10000, max(low, 10000)), range(min(high, 65535) + 1, 65536)
    free = below if len(below) >= len(above) else above
    return free[(job_id * 31 + restart * 7919) % len(free)] if free else 29500


def ephemeral_ports() -> tuple[int, int]:
    """The system's range of ephemeral ports."""
    try:
        with open(_EPHEMERAL) as file:  # noqa: PTH123 - a file of the kernel's
            low, high = file.read().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def place(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of RankEnv for a task that srun started; raises UsageError with the fix."""
    try:
        world = int(environ["SLURM_NTASKS"])
        rank, local_rank = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
        job_id, restart = int(environ["SLURM_JOB_ID"]), environ.get("SLURM_RESTART_COUNT", "0")
        port = int(
            environ.get("MASTER_PORT") or default_port(job_id, int(restart), ephemeral_ports())
        )
        counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(world)))
        nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    except KeyError as error:
        raise UsageError(f"Slurm's variables cannot be read: {error.args[0]} is not set") from None
    except ValueError as error:
        raise UsageError(f"Slurm's variables cannot be read: {error}") from None
    if sum(counts) != world or len(set(counts)) != 1:
        raise UsageError(
            f"SLURM_NTASKS is {world} and the step has {sum(counts)} tasks, {counts} on its nodes: "
            "give --nodes and --ntasks-per-node, and not --ntasks"
        )
    suffix = environ.get("JOBKIT_INTERFACE_SUFFIX", "")
    return {
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world,
        "local_world_size": counts[0],
        "master_addr": environ.get("MASTER_ADDR") or nodes[0] + suffix,
        "master_port": port,
    }
