"""Check an EDF, the environment definition file of the CSCS container engine, without Slurm.

A mistake in the file is else found when the job starts, after its time in the queue, and some are
not found at all: a network hook that is off makes a job slow, not wrong.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.launch import edf_rules as rules
from jobkit.launch.edf_annotations import check_annotations, clashes
from jobkit.launch.edf_text import Finding, Host, Key, Report, key_lines

DEEPEST = 10  # levels of base environments
LONGEST = 64 * 1024  # characters; an EDF has a few thousand at most


def check(text: str, folder: Path, environ: Mapping[str, str], here: bool = True) -> list[Finding]:
    """What is wrong in an EDF, in the order of its lines.

    folder: where srun will be called, because relative paths start there (not at the EDF).
    environ: the variables that srun will see. here: False when the check is made on another
    machine, so that paths are not looked for and an unset variable is but a warning.
    """
    host = Host(folder=folder, environ=environ, here=here)
    own = _read(text, host)
    inherited = _Bases(host, own.report).inherit(own.base_names, ("base_environment",), [])
    _check_together(own, inherited)
    order = sorted(own.report.findings, key=lambda finding: (finding.line, finding.severity))
    return list(dict.fromkeys(order))


@dataclass(kw_only=True)
class _Edf:
    """One file after its own checks: what was sound in it, and what was not."""

    report: Report
    broken: bool = False  # no TOML, so that nothing is known of it
    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # annotations by their dotted names
    base_names: dict[int, str] = field(default_factory=dict)


def _read(text: str, host: Host) -> _Edf:
    """Check all that needs one file only."""
    try:
        if len(text) > LONGEST:
            raise ValueError(f"is longer than {LONGEST} characters: this is no EDF")
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        report = Report(lines={(): _error_line(text, error)})
        report.error((), _no_toml(error))
        return _Edf(report=report, broken=True)
    report = Report(lines=key_lines(text))
    edf = _Edf(report=report, settings=rules.well_typed(data, report))
    for name, rule in _RULES.items():
        if name in edf.settings:
            rule(edf.settings[name], host, report)
    edf.notes = check_annotations(edf.settings.get("annotations", {}), host, report)
    bases = edf.settings.get("base_environment", [])
    edf.base_names = rules.strings("base_environment", bases, host, report)
    return edf


_RULES = {
    "image": rules.check_image,
    "workdir": rules.check_workdir,
    "mounts": rules.check_mounts,
    "devices": rules.check_devices,
    "env": rules.check_env,
}


def _error_line(text: str, error: Exception) -> int:
    """The line that tomllib names; the last one with anything on it for the end of the file."""
    match = re.search(r"at line (\d+)", str(error))
    return int(match[1]) if match else text.rstrip().count("\n") + 1


def _no_toml(error: Exception) -> str:
    if isinstance(error, tomllib.TOMLDecodeError):
        return f"not valid TOML: {error}"
    what = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return f"not valid TOML: {what}"


def _check_together(own: _Edf, inherited: _Edf) -> None:
    """Check what this file and its base environments make together."""
    if own.broken:
        return
    settings = {**inherited.settings, **own.settings}
    if not settings.get("image") and not inherited.broken:
        fix = 'add image = "REGISTRY#NAME:TAG"'
        own.report.warn(("image",), f"no image, so that srun would enter no container: {fix}")
    for clash in clashes({**inherited.notes, **own.notes}, settings):
        key = _place(clash.key, own)
        own.report.add(clash.severity, key, clash.message)


def _place(key: Key, own: _Edf) -> Key:
    """Where an annotation stands: as it is written here, else where it was inherited."""
    name = ".".join(str(part) for part in key[1:])
    for known in own.report.lines:
        if known[:1] == ("annotations",) and ".".join(str(part) for part in known[1:]) == name:
            return known
    return ("base_environment",)


@dataclass
class _Bases:
    """Follows base environments to their files, and checks those too."""

    host: Host
    report: Report  # of the file that was asked for: findings stand at its base_environment
    known: dict[Path, _Edf] = field(default_factory=dict)

    def inherit(self, names: dict[int, str], key: Key, chain: list[Path]) -> _Edf:
        """All that the named files set together; a later one overwrites an earlier one."""
        total = _Edf(report=self.report)
        for i, name in names.items():
            place = key if chain else (*key, i)
            path = self._find(name, place)
            edf = self._load(path, place, chain) if path else _Edf(report=self.report, broken=True)
            total.settings.update(edf.settings)
            total.notes.update(edf.notes)
            total.broken |= edf.broken
        return total

    def _load(self, path: Path, place: Key, chain: list[Path]) -> _Edf:
        """One file with all that it inherits in turn."""
        nothing = _Edf(report=self.report, broken=True)
        if path in chain:
            names = " -> ".join(p.name for p in [*chain[chain.index(path) :], path])
            self.report.error(place, f"base environments in a circle: {names}: remove one of them")
            return nothing
        if len(chain) == DEEPEST:
            fix = "copy some of them into one file"
            self.report.error(place, f"more than {DEEPEST} levels of base environments: {fix}")
            return nothing
        if path not in self.known:
            self.known[path] = nothing
            self.known[path] = self._check(path, place, chain)
        return self.known[path]

    def _check(self, path: Path, place: Key, chain: list[Path]) -> _Edf:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            self.report.error(place, f"the base environment {path} cannot be read: {why}")
            return _Edf(report=self.report, broken=True)
        own = _read(text, self.host)
        for found in own.report.findings:
            self.report.add(found.severity, place, f"in {path}:{found.line}: {found.message}")
        inherited = self.inherit(own.base_names, place, [*chain, path])
        own.settings = {**inherited.settings, **own.settings}
        own.notes = {**inherited.notes, **own.notes}
        own.broken |= inherited.broken
        return own

    def _find(self, name: str, place: Key) -> Path | None:
        """The file of a base environment, found as srun --environment finds one."""
        if rules.is_path(name):
            if not self.host.missing(name):
                return self.host.folder / name
            self.report.error(
                place, f"the base environment {name} does not exist: correct its path"
            )
            return None
