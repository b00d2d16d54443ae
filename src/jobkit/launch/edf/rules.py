"""The rules for the keys of an EDF: types, image, workdir, mounts, [env]."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from jobkit.errors import nearest
from jobkit.launch.command import RANK_VARIABLES
from jobkit.launch.edf.report import EdfReport

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
    list: "an array of strings",
    dict: "a table",
}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}$")
_ENV_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def well_typed(data: dict[str, Any], report: EdfReport) -> dict[str, Any]:
    """The known keys with a value of the right type; the report names the others."""
    sound = {}
    for name, value in data.items():
        if name not in TYPES:
            report.error(name, f"unknown key{nearest(name, TYPES)} (known: {', '.join(TYPES)})")
        elif not isinstance(value, TYPES[name]):
            wanted = " or ".join(_NAMES[kind] for kind in TYPES[name])
            report.error(name, f"must be {wanted}")
        else:
            sound[name] = value
    return sound


def strings(name: str, values: list[Any], report: EdfReport) -> Iterator[tuple[str, str]]:
    """Each string of an array, by its key and with its variables replaced."""
    for index, value in enumerate(values):
        key = f"{name}[{index}]"
        if not isinstance(value, str):
            report.error(key, "must be a string")
        elif (text := report.expand(value, key)) is not None:
            yield key, text


def is_path(text: str) -> bool:
    """Whether the engine takes a text for a path: an absolute one, or one that starts with ./"""
    return text.startswith(("/", "./"))


def check_base(value: Any, report: EdfReport) -> None:
    """Base environments must be found as `srun --environment` finds them; not read here."""
    home = report.host.environ.get("HOME", "")
    folders = (report.host.environ.get("EDF_PATH") or f"{home}/.edf").split(":")
    names = [value] if isinstance(value, str) else value
    for key, name in strings("base_environment", names, report):
        paths = [name] if is_path(name) else [f"{folder}/{name}.toml" for folder in folders]
        if all(report.host.missing(path) for path in paths):
            report.error(key, f"'{name}' was not found as {' or '.join(paths)}")


def check_image(value: str, report: EdfReport) -> None:
    """An image file must exist; anything else is an image of a registry."""
    image = report.expand(value, "image")
    if not image:
        return
    if is_path(image) and report.host.missing(image):
        report.error("image", f"{image} does not exist: make it with 'enroot import'")
    elif image.endswith((".sqsh", ".squashfs")) and not is_path(image):
        report.error("image", f"{image} is taken for an image of a registry: write ./{image}")
    elif not is_path(image) and not _DIGEST.search(image):
        fix = "where that matters, run 'enroot import' once and name the file"
        report.note("image", f"a tag can be moved to another image: {fix}")


def check_workdir(value: str, report: EdfReport) -> None:
    """The working directory is an absolute path in the container."""
    workdir = report.expand(value, "workdir")
    if workdir is not None and not workdir.startswith("/"):
        fix = "write an absolute path, or ${PWD} for where srun is called"
        report.error("workdir", f"'{workdir}' is relative: {fix}")


def check_mounts(value: list[Any], report: EdfReport) -> None:
    """SOURCE:DESTINATION[:FLAGS], from an existing path to an absolute one."""
    for key, mount in strings("mounts", value, report):
        parts = mount.split(":")
        if len(parts) not in (2, 3) or not all(parts):
            report.error(key, f"'{mount}' is not SOURCE:DESTINATION or SOURCE:DESTINATION:FLAGS")
            continue
        source, target = parts[:2]
        if not is_path(source):
            report.error(key, f"source '{source}' is no path: write /{source} or ./{source}")
        elif report.host.missing(source):
            report.error(key, f"source {source} does not exist")
        if not target.startswith("/"):
            report.error(key, f"'{mount}': the destination must be an absolute path")


def check_env(table: dict[str, Any], report: EdfReport) -> None:
    """Names and strings, and no variable that run.sh or srun sets for each rank."""
    for name, value in table.items():
        key = f"env.{name}"
        if name in TYPES:
            report.error(key, misplaced("env"))
        elif not isinstance(value, str):
            report.error(key, "must be a string, within quotes")
        elif not _ENV_NAME.fullmatch(name):
            report.error(key, "is no name of a variable: use A-Z, 0-9 and _")
        elif name in RANK_VARIABLES or name.startswith(("SLURM_", "PMI_", "PMIX_")):
            report.error(key, "would be the same for every rank: remove it")
        elif name == "PYTHONPATH" and "${PYTHONPATH" not in value:
            report.error(key, "hides run.sh's, so that jobkit is not found: add ${PYTHONPATH:-}")
        else:
            report.expand(value, key)


def misplaced(table: str) -> str:
    """The message for a key of the top level that follows a table's header."""
    return f"is read as part of [{table}], whose header is above it: move it to the top"


RULES: dict[str, Callable[[Any, EdfReport], None]] = {
    "base_environment": check_base,
    "image": check_image,
    "workdir": check_workdir,
    "mounts": check_mounts,
    "env": check_env,
}
