"""The rules of an EDF's [annotations]: names, values, and what contradicts what."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jobkit.errors import nearest
from jobkit.launch.edf.rules import TYPES, misplaced, type_name
from jobkit.launch.edf.text import Host, Key, Report, expand

CXI = "com.hooks.cxi.enabled"
NCCL = "com.hooks.aws_ofi_nccl.enabled"
VARIANT = "com.hooks.aws_ofi_nccl.variant"
SSH = "com.hooks.ssh.enabled"
SSH_KEY = "com.hooks.ssh.authorize_ssh_key"
SSH_PORT = "com.hooks.ssh.port"
MPS = "com.hooks.nvidia_cuda_mps.enabled"
SOURCE = "com.hooks.netstack.source"
VERSION = "com.hooks.netstack.version"
NAME = "com.hooks.netstack.name"
REMAP = "com.pyxis.pytorch_remap_vars"
ENTRY_LOG = "com.pyxis.entrypoint_log"
SWITCHES = (
    *(CXI, NCCL, SSH, MPS, REMAP, ENTRY_LOG),
    *("com.hooks.dcgm.enabled", "com.hooks.slurm.enabled"),
)
KNOWN = (*SWITCHES, VARIANT, SSH_KEY, SSH_PORT, SOURCE, VERSION, NAME)
SOURCES = ("host", "artifact")
VARIANTS = ("cuda-dl", "cuda12", "cuda13", "rocm5", "rocm6")


class Clash(NamedTuple):
    """Settings that cannot stand together. They may come from different files."""

    key: Key  # the one to change
    severity: str
    message: str


def flat(value: Any, key: Key = ("annotations",)) -> Iterator[tuple[str, Key, Any]]:
    """The dotted name, the path in the file, and the value of each annotation.

    com.hooks.x may be written as tables, dotted keys or one quoted key: all are the same name.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, (*key, name))
    elif len(key) > 1:
        yield ".".join(str(part) for part in key[1:]), key, value


def check_annotations(table: dict[str, Any], host: Host, report: Report) -> dict[str, str]:
    """Check each annotation for itself; return those that are known by their dotted names."""
    made: dict[str, str] = {}
    seen: dict[str, Key] = {}
    for name, key, value in flat(table):
        first = seen.setdefault(name, key)
        if first != key:
            line = report.lines.get(first, 1)
            report.error(key, f"annotation {name} is already set on line {line}: keep one of them")
        elif name not in KNOWN:
            _check_unknown(name, key, report)
        elif not isinstance(value, str):
            report.error(key, _no_string(name, value))
        else:
            text = expand(value, key, host, report)
            if text is not None:
                _check_value(name, text, key, host, report)
            made[name] = value if text is None else text
    return made


def _check_unknown(name: str, key: Key, report: Report) -> None:
    if name.startswith("com.sarus."):
        return  # any setting of that engine may be given
    hint = nearest(name, KNOWN)
    if name in TYPES:
        report.error(key, misplaced(name, "annotations"))
    elif hint or name.startswith(("com.hooks.", "com.pyxis.")):
        report.error(key, f"unknown annotation '{name}'{hint}")
    else:
        report.warn(key, f"no part of the engine reads the annotation '{name}': is it needed?")


def _no_string(name: str, value: object) -> str:
    said = "true" if value in (True, 1) else "false"
    fix = f'"{said}"' if name in SWITCHES else "its value within quotes"
    return f"annotation {name} must be a string, not {type_name(value)}: write {fix}"


def _check_value(name: str, text: str, key: Key, host: Host, report: Report) -> None:
    """Check that the value can be one of this annotation."""
    if name in SWITCHES and text not in ("true", "false"):
        report.error(key, f'annotation {name} is \'{text}\': write "true" or "false"')
    elif name == SOURCE and text not in SOURCES:
        known = " or ".join(SOURCES)
        report.error(key, f"unknown source '{text}'{nearest(text, SOURCES)} (known: {known})")
    elif name == VARIANT and text not in VARIANTS:  # sites may have more
        known = ", ".join(VARIANTS)
        hint = nearest(text, VARIANTS)
        report.warn(key, f"a variant '{text}' is not known{hint} (known: {known})")
    elif name == SSH_PORT and not (re.fullmatch("[0-9]{1,5}", text) and 0 < int(text) < 65536):
        report.error(key, f"'{text}' is no port: write a number from 1 to 65535, within quotes")
    elif name == SSH_KEY:
        _check_ssh_key(text, key, host, report)


def _check_ssh_key(text: str, key: Key, host: Host, report: Report) -> None:
    if not text.startswith("/"):
        what = "the key itself" if text.startswith(("ssh-", "ecdsa-")) else "no whole path"
        fix = "write the whole path of the file of the public key"
        report.error(key, f"{SSH_KEY} is {what}: {fix}")
    elif host.missing(text):
        report.error(key, f"the public key {text} does not exist: make it with ssh-keygen")


def clashes(notes: dict[str, str], settings: dict[str, Any]) -> Iterator[Clash]:
    """What contradicts what, in the annotations and keys that hold in the end."""
    for rule in _RULES:
        for name, severity, message in rule(notes, settings):
            yield Clash(("annotations", *name.split(".")), severity, message)


_Found = Iterator[tuple[str, str, str]]


def _network(notes: dict[str, str], _: dict[str, Any]) -> _Found:
    """The Slingshot hooks."""
    if notes.get(NCCL) == "true" and notes.get(CXI) == "false":
        yield CXI, "error", f'{NCCL} needs the network that {CXI} = "false" takes away: set "true"'
    elif notes.get(NCCL) == "true" and CXI not in notes:
        fix = f'add {CXI} = "true", because not every version of the engine implies it'
        yield NCCL, "warning", f"{NCCL} without {CXI}: {fix}"
    if VARIANT in notes and notes.get(NCCL) != "true":
        fix = f'set {NCCL} = "true", else NCCL falls back to TCP'
        severity = "error" if NCCL not in notes else "warning"  # "false" may be meant so
        yield VARIANT, severity, f"{VARIANT} has no effect without the hook: {fix}"


def _netstack(notes: dict[str, str], _: dict[str, Any]) -> _Found:
    """Where the network's libraries come from."""
    if notes.get(SOURCE) == "artifact" and VARIANT in notes:
        yield VARIANT, "warning", f'{VARIANT} is ignored with {SOURCE} = "artifact": remove one'
    for name in (VERSION, NAME):
        if notes.get(SOURCE) == "host" and name in notes:
            yield name, "error", f'{name} chooses an artifact, and {SOURCE} is "host": remove one'


def _ranks(notes: dict[str, str], settings: dict[str, Any]) -> _Found:
    """Pyxis' own settings."""
    if notes.get(REMAP) == "true":
        why = "sets RANK and LOCAL_RANK beside the ranks that jobkit finds from Slurm"
        yield REMAP, "error", f'{REMAP} {why}: remove it, or set "false"'
    if notes.get(ENTRY_LOG) == "true" and not settings.get("entrypoint"):
        yield ENTRY_LOG, "warning", f"{ENTRY_LOG} has no effect without entrypoint = true"


def _ssh(notes: dict[str, str], settings: dict[str, Any]) -> _Found:
    """What needs a container that can be written to, and what needs the SSH hook."""
    for name in (SSH, MPS):
        if notes.get(name) == "true" and settings.get("writable") is False:
            fix = "set writable = true"
            yield name, "error", f"{name} needs a container that can be written to: {fix}"
    if notes.get(SSH) == "true" and SSH_KEY not in notes:
        yield SSH, "error", f"{SSH} lets nobody in: add {SSH_KEY} with the file of a public key"
    for name in (SSH_KEY, SSH_PORT):
        if name in notes and notes.get(SSH) != "true":
            yield name, "warning", f'{name} has no effect without {SSH} = "true"'


_RULES: tuple[Callable[[dict[str, str], dict[str, Any]], _Found], ...] = (
    _network,
    _netstack,
    _ranks,
    _ssh,
)
