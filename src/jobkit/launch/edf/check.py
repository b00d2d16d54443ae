"""Check an EDF, the environment definition file of the CSCS container engine, without Slurm.

A mistake in the file is else found when the job starts, after its time in the queue, and some are
not found at all: a network hook that is off makes a job slow, not wrong.
"""

import posixpath
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.errors import nearest
from jobkit.files import read_text
from jobkit.launch.edf import rules
from jobkit.launch.edf.annotations import check_annotations, clashes
from jobkit.launch.edf.text import Finding, Host, Key, Report, key_lines

DEEPEST = 10  # levels of base environments
LONGEST = 64 * 1024  # characters; an EDF has a few thousand at most

_RULES: dict[str, Callable[[Any, Host, Report], None]] = {
    "image": rules.check_image,
    "workdir": rules.check_workdir,
    "mounts": rules.check_mounts,
    "devices": rules.check_devices,
    "env": rules.check_env,
}
# What the words of tomllib mostly come from.
_TOML_HINTS = {
    "Cannot overwrite a value": "; a key or table is there twice: keep one of them",
    "Cannot declare": "; a key or table is there twice: keep one of them",
    "Invalid value": "; a string stands within quotes, true and false without",
    "Illegal character": "; a string ends with a quote on its line",
    "Unclosed array": "; an array ends with ']', with ',' between its items",
    "Expected '='": "; a line is KEY = VALUE or [TABLE]",
}


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
    """What a file sets, or several of them together."""

    report: Report
    complete: bool = True  # False: something is not known, so that clashes cannot be told
    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # annotations by their dotted names
    base_names: dict[int, str] = field(default_factory=dict)
    height: int = 0  # levels of base environments below

    def add(self, other: "_Edf") -> None:
        """Let another file's settings overwrite these."""
        self.settings = {**self.settings, **other.settings}
        self.notes = {**self.notes, **other.notes}
        self.complete = self.complete and other.complete
        self.height = max(self.height, other.height)


def _read(text: str, host: Host) -> _Edf:
    """Check all that needs one file only."""
    try:
        if len(text) > LONGEST:
            raise ValueError(f"longer than {LONGEST} characters, so that this is no EDF")
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        report = Report(lines={(): _error_line(text, error)})
        report.error((), _no_toml(error))
        return _Edf(report=report, complete=False)
    report = Report(lines=key_lines(text))
    settings = rules.well_typed(data, report)
    edf = _Edf(report=report, settings=settings)
    edf.notes = check_annotations(settings.get("annotations", {}), host, report)
    bases = settings.get("base_environment") or []
    edf.base_names = rules.strings("base_environment", bases, host, report)
    expected = 1 if isinstance(bases, str) else len(bases)
    edf.complete = len(edf.base_names) == expected and all(
        found.severity != "error" for found in report.findings
    )
    for name, rule in _RULES.items():
        if name in settings:
            rule(settings[name], host, report)
    return edf


def _error_line(text: str, error: Exception) -> int:
    """The line that tomllib names; the last one with anything on it for the end of the file."""
    match = re.search(r"at line (\d+)", str(error))
    return int(match[1]) if match else text.rstrip().count("\n") + 1


def _no_toml(error: Exception) -> str:
    said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    hints = (hint for start, hint in _TOML_HINTS.items() if said.startswith(start))
    return f"not valid TOML: {re.sub(r' [(]at .*[)]$', '', said)}{next(hints, '')}"


def _check_together(own: _Edf, inherited: _Edf) -> None:
    """Check what this file and its base environments make together."""
    settings = {**inherited.settings, **own.settings}
    if not (own.complete and inherited.complete):
        return
    if not settings.get("image"):
        fix = 'add image = "REGISTRY#NAME:TAG"'
        own.report.warn(("image",), f"no image, so that srun would enter no container: {fix}")
    for clash in clashes({**inherited.notes, **own.notes}, settings):
        own.report.add(clash.severity, _place(clash.key, own), clash.message)


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
            total.add(self._load(path, place, chain) if path else self._nothing())
        return total

    def _nothing(self) -> _Edf:
        return _Edf(report=self.report, complete=False)

    def _load(self, path: Path, place: Key, chain: list[Path]) -> _Edf:
        """One file with all that it inherits in turn."""
        if path in chain:
            names = " -> ".join(p.name for p in [*chain[chain.index(path) :], path])
            self.report.error(place, f"base environments in a circle ({names}): remove one of them")
            return self._nothing()
        # A file that was met before is not read again, but may be too deep by this way.
        edf = self.known.get(path, _Edf(report=self.report, height=1))
        if len(chain) + edf.height > DEEPEST:
            fix = "copy some of them into one file"
            self.report.error(place, f"more than {DEEPEST} levels of base environments: {fix}")
            return self._nothing()
        if path not in self.known:
            self.known[path] = self._check(path, place, chain)
        return self.known[path]

    def _check(self, path: Path, place: Key, chain: list[Path]) -> _Edf:
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            self.report.error(place, f"the base environment {path} cannot be read: {why}")
            return self._nothing()
        own = _read(text, self.host)
        for found in own.report.findings:
            self.report.add(found.severity, place, f"in {path}:{found.line}: {found.message}")
        total = self.inherit(own.base_names, place, [*chain, path])
        total.add(own)
        total.height += 1
        return total

    def _find(self, name: str, place: Key) -> Path | None:
        """The file of a base environment, found as `srun --environment` finds one."""
        candidates = [folder / f"{name}.toml" for folder in self._search_path()]
        if rules.is_path(name):
            candidates = [self.host.folder / name]
        elif "/" in name:
            candidates = []
        for path in candidates:
            if self.host.is_file(path):
                return Path(posixpath.normpath(path))
        severity = "error" if self.host.here else "warning"
        self.report.add(severity, place, self._not_found(name))
        return None

    def _search_path(self) -> list[Path]:
        home = self.host.environ.get("HOME", "")
        folders = self.host.environ.get("EDF_PATH") or (f"{home}/.edf" if home else "")
        return [Path(folder) for folder in folders.split(":") if folder]

    def _not_found(self, name: str) -> str:
        what = f"base environment '{name}'"
        if rules.is_path(name):
            return f"{what} does not exist: correct the path, which starts where srun is called"
        if "/" in name or name.endswith(".toml"):
            return f"{what} is taken for a name: write ./{name} or the whole path"
        folders = self._search_path()
        known = [path.stem for folder in folders for path in folder.glob("*.toml")]
        where = ":".join(str(folder) for folder in folders) or "no folder: set EDF_PATH"
        return f"{what} was not found{nearest(name, known)} (looked for {name}.toml in {where})"
