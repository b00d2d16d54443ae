"""The fields and types of what ranks send in a preflight, checked before anything reads them."""

from collections.abc import Mapping
from typing import Any

# A list's type stands in a list, that of a mapping's values in a mapping.
_HELLO = {"rank": int, "host": str}
_FACTS = {
    **_HELLO,
    **dict.fromkeys(("local_rank", "world_size", "pid", "master_port", "gpus"), int),
    **dict.fromkeys(("place_fault", "machine", "master_addr", "system", "hostname"), str),
    **dict.fromkeys(("interface", "log_dir", "log_fault"), str),
    **dict.fromkeys(("local_world_size", "machine_cores", "threads"), int),
    **{name: [str] for name in ("nodes", "master_ips", "own_ips")},
    **dict.fromkeys(("clock_ahead_s", "clock_error_s"), float),
    "tasks": int | None,
    "cores": [int],
    "versions": {"": str},
    "commit": str | None,
}
_OPTIONAL_FACTS = {
    **dict.fromkeys(("gpu", "gpu_name", "gpu_fault", "gpu_cores", "gpu_errors"), str),
    **dict.fromkeys(("open_files", "memlock_mib", "shm_mib"), int),
    "gpu_state": {"": str},
    "nics": {"": float | int},
    "bindings": {"": str},
    **dict.fromkeys(("dataset", "data_dir", "data_fault", "data_dir_fault", "cache"), str),
    "cached": bool,
}
_RESULTS = {**_HELLO, "hidden": [str], "cache_fault": str}
_OPTIONAL_RESULTS = {
    **dict.fromkeys(("group_fault", "backend"), str),
    **dict.fromkeys(("sum", "latency_us", "mib", "bus_mb_per_s"), float | int),
    **dict.fromkeys(("load", "core_wait_share"), float | int),
    **dict.fromkeys(("members", "nvls_channels"), int),
    "links": [str],
    "networks": [str],
}
_FIELDS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "hello": (_HELLO, {}),
    "facts": (_FACTS, _OPTIONAL_FACTS),
    "results": (_RESULTS, _OPTIONAL_RESULTS),
}


def is_valid(stage: str, message: Mapping[str, Any]) -> bool:
    """Return whether a message has all fields of its stage, each of its type."""
    required, optional = _FIELDS[stage]
    fields = {**required, **{name: kind for name, kind in optional.items() if name in message}}
    return all(name in message and _fits(message[name], kind) for name, kind in fields.items())


def _fits(value: object, kind: Any) -> bool:
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(one, kind[0]) for one in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_fits(one, kind[""]) for one in value.values())
    return isinstance(value, kind)
