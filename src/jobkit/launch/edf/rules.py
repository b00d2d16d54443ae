"""The rules of an EDF, key by key: types, image, workdir, mounts, [env]."""

import posixpath
import re
from typing import Any

from jobkit.errors import nearest
from jobkit.launch.edf.text import Host, Key, Report, expand

TYPES: dict[str, tuple[type, ...]] = {
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
_NAMES = {
    str: "a string",
    bool: "true or false (without quotes)",
    int: "a number",
    float: "a number",
    list: "an array of strings",
    dict: "a table",
}
# What mount(8) takes for a bind mount, and the engine's own word for a SquashFS file.
FLAGS = (
    *("ro", "rw", "bind", "rbind", "private", "rprivate", "shared", "rshared", "slave", "rslave"),
    *("unbindable", "runbindable", "nosuid", "suid", "nodev", "dev", "noexec", "exec"),
    *("noatime", "relatime", "strictatime", "nodiratime", "sync", "async", "sqsh"),
)
_NAME = r"[a-z0-9]+(?:(?:/|[.]|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[^@/#\s]+@)?(?:[\w.-]+(?::\d+)?#)?{_NAME}(?P<tag>:\w[\w.-]*|@sha256:[0-9a-f]{{64}})?"
)
_REGISTRY = re.compile(r"(?:[^@/#]+@)?((?:[\w-]+\.)+[\w-]+(?::\d+)?|localhost(?::\d+)?)/(.*)")
_ENV_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def type_name(value: object) -> str:
    """How a TOML value's type is called."""
    if isinstance(value, bool):
        return "a boolean"
    return "an array" if isinstance(value, list) else _NAMES.get(type(value), "a date or time")


def well_typed(data: dict[str, Any], report: Report) -> dict[str, Any]:
    """The keys that are known and of the right type; the report names the others."""
    sound = {}
    for name, value in data.items():
        wanted = TYPES.get(name)
        if wanted is None:
            longer = next((key for key in TYPES if name.startswith(key)), "")  # "environment"
            hint = f"; did you mean '{longer}'?" if longer else nearest(name, TYPES)
            known = ", ".join(TYPES)
            report.error((name,), f"unknown key '{name}'{hint} (known: {known})")
        elif not isinstance(value, wanted):
            report.error((name,), _wrong_type(name, value))
        else:
            sound[name] = value
    return sound


def _wrong_type(name: str, value: object) -> str:
    wanted = " or ".join(_NAMES[kind] for kind in TYPES[name])
    fix = f': write ["{value}"]' if TYPES[name] == (list,) and isinstance(value, str) else ""
    return f"{name} must be {wanted}, not {type_name(value)}{fix}"


def strings(name: str, value: Any, host: Host, report: Report) -> dict[int, str]:
    """The strings of a key that is one or several, by position, with their variables put in."""
    made = {}
    for i, item in enumerate([value] if isinstance(value, str) else value):
        key: Key = (name, i) if isinstance(value, list) else (name,)
        if not isinstance(item, str):
            report.error(key, f"{name} must hold strings only, not {type_name(item)}")
            continue
        text = expand(item, key, host, report)
        if text is not None:
            made[i] = text
    return made


def is_path(path: str) -> bool:
    """Whether the engine takes this for a path: a whole one, or one that begins with ./"""
    return path.startswith(("/", "./"))


def check_image(value: str, host: Host, report: Report) -> None:
    """A registry's image, or a file that exists."""
    key: Key = ("image",)
    image = expand(value, key, host, report)
    if not image:
        return  # empty: no container, which is said when no base environment has one either
    if is_path(image):
        if host.missing(image):
            fix = "make it with 'enroot import', or correct the path"
            report.error(key, f"the image file {image} does not exist: {fix}")
    elif image.endswith((".sqsh", ".squashfs")):
        fix = f"write ./{image} or the whole path"
        report.error(key, f"{image} is taken for an image of a registry: {fix}")
    else:
        _check_reference(image, report)


def _check_reference(image: str, report: Report) -> None:
    """[USER@][REGISTRY#]IMAGE[:TAG]"""
    key: Key = ("image",)
    if "://" in image:
        report.error(key, f"an image has no '{image.split('://')[0]}://' before it: leave that out")
        return
    match = _IMAGE.fullmatch(image)
    if match is None:
        form = "[USER@][REGISTRY#]IMAGE[:TAG], with IMAGE in lower case"
        report.error(key, f"'{image}' is no image: write {form}, or the path of a .sqsh file")
        return
    slashed = _REGISTRY.fullmatch(image)
    if slashed and "#" not in image:
        registry, rest = slashed.groups()
        fix = f"write {registry}#{rest}, which every version of the engine reads"
        report.warn(key, f"the registry {registry} is followed by '/': {fix}")
    if not match["tag"]:
        report.warn(key, f"{image} has no tag, so that it may change: write {image}:TAG")


def check_workdir(value: str, host: Host, report: Report) -> None:
    """A folder in the container, so that it cannot be looked for here."""
    workdir = expand(value, ("workdir",), host, report)
    if workdir is not None and not workdir.startswith("/"):
        fix = "write the whole path, or ${PWD} for where srun is called"
        report.error(("workdir",), f"workdir '{workdir}' does not begin with '/': {fix}")


def check_mounts(value: list[Any], host: Host, report: Report) -> None:
    """SOURCE:DESTINATION[:FLAGS], each destination once."""
    taken: dict[str, int] = {}
    for i, mount in strings("mounts", value, host, report).items():
        key: Key = ("mounts", i)
        parts = mount.split(":")
        if len(parts) not in (2, 3) or not all(parts):
            report.error(key, _malformed(mount, parts))
            continue
        flags = parts[2].split("+") if len(parts) == 3 else []
        _check_source(parts[0], key, host, report)
        _check_flags(flags, parts[0], key, host, report)
        target = posixpath.normpath(parts[1])
        if not target.startswith("/"):
            fix = "where it shall be in the container, as a whole path"
            report.error(key, f"mount '{mount}': destination '{parts[1]}' is relative: write {fix}")
        elif target in taken:
            first = report.lines.get(("mounts", taken[target]), 1)
            report.error(key, f"{target} is already the destination of the mount on line {first}")
        taken.setdefault(target, i)


def _malformed(mount: str, parts: list[str]) -> str:
    if len(parts) == 1 and mount:
        return f"mount '{mount}' has one side only: write {mount}:{mount}"
    what = "too many ':'" if len(parts) > 3 else "an empty part"
    return f"mount '{mount}' has {what}: write SOURCE:DESTINATION or SOURCE:DESTINATION:FLAGS"


def _check_source(source: str, key: Key, host: Host, report: Report) -> None:
    if not is_path(source):
        fix = f"write ./{source} (from where srun is called) or the whole path"
        report.error(key, f"mount source '{source}' is taken for a name: {fix}")
    elif host.missing(source):
        report.error(key, f"mount source {source} does not exist: create it or correct the path")


def _check_flags(flags: list[str], source: str, key: Key, host: Host, report: Report) -> None:
    for flag in flags:
        if flag in FLAGS:
            continue
        if "," in flag:
            joined = flag.replace(",", "+")
            report.error(key, f"mount flags '{flag}': flags are joined with '+': write {joined}")
        else:
            known = ", ".join(FLAGS)
            hint = nearest(flag, FLAGS)
            report.error(key, f"unknown mount flag '{flag}'{hint} (known: {known})")
    if "ro" in flags and "rw" in flags:
        report.error(key, "mount flags ro and rw contradict each other: keep one")
    if "sqsh" in flags and len(flags) > 1:
        report.error(key, "the mount flag sqsh stands alone: leave the other flags out")
    elif "sqsh" in flags and host.is_folder(source):
        report.error(key, f"mount flag sqsh: {source} is a folder: name a SquashFS file")


def check_devices(value: list[Any], host: Host, report: Report) -> None:
    """A key of the engine's successor."""
    strings("devices", value, host, report)
    report.warn(("devices",), "devices is read by Sarus Suite only: leave it out for srun's EDF")


def check_env(table: dict[str, Any], host: Host, report: Report) -> None:
    """Names and strings; and nothing that run.sh and the payload decide for each rank."""
    for name, value in table.items():
        key: Key = ("env", name)
        if name in TYPES:
            report.error(key, misplaced(name, "env"))
        elif not isinstance(value, str):
            report.error(key, _no_string(name, value))
        elif not _ENV_NAME.fullmatch(name):
            report.error(key, f"'{name}' cannot be the name of a variable: use A-Z, 0-9 and _")
        elif name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            report.error(key, f"[env] {name} would be the same for every rank: remove it")
        elif name == "PYTHONPATH" and "${PYTHONPATH" not in value:
            fix = "add ${PYTHONPATH:-} to it"
            report.error(key, f"[env] PYTHONPATH hides run.sh's, so that jobkit is missing: {fix}")
        else:
            _check_value(value, key, table, host, report)


def misplaced(name: str, table: str) -> str:
    """The text for a key of the top level that stands after a table's header."""
    return f"{name} is read as a part of [{table}], whose header is above it: move it up to the top"


def _no_string(name: str, value: object) -> str:
    short = isinstance(value, (bool, int, float)) and abs(value) < 1e15
    quoted = f': write "{str(value).lower()}"' if short else ""
    return f"[env] {name} must be a string, not {type_name(value)}{quoted}"


def _check_value(value: str, key: Key, table: dict[str, Any], host: Host, report: Report) -> None:
    for other in table:
        if f"${{{other}}}" in value.replace("$$", "") and other not in host.environ:
            fix = "write its value out"
            report.error(key, f"${{{other}}} is an entry of [env], which others cannot use: {fix}")
            return
    expand(value, key, host, report)
