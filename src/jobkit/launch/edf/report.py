"""The findings of a check of an EDF, and the variables that its values refer to."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import nearest
from jobkit.launch.findings import Findings

# $$ | ${NAME} | ${NAME:-default} | a $ that starts none of them
_DOLLAR = re.compile(r"\$(?:\$|\{([A-Za-z_]\w*)(?::-([^}]*))?\}|([A-Za-z_]\w*)?)", re.ASCII)


@dataclass(frozen=True)
class Host:
    """The machine and the environment in which srun reads the EDF."""

    folder: Path  # where srun is called
    environ: Mapping[str, str]
    here: bool = True  # False: another machine; neither paths nor variables can be checked

    def missing(self, path: str) -> bool:
        """Whether a path is known not to exist."""
        try:
            return self.here and not (self.folder / path).exists()
        except (OSError, ValueError):  # a name too long, a NUL, a folder without access
            return True


class EdfReport(Findings):
    """Collects the findings on one file."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host

    def expand(self, value: str, key: str) -> str | None:
        """The value with its variables replaced; None, with findings, where that fails."""
        before = len(self.findings)
        text = _DOLLAR.sub(lambda match: self._replacement(match, key), value)
        return text if len(self.findings) == before else None

    def _replacement(self, match: re.Match[str], key: str) -> str:
        name, default, bare = match.groups()
        environ = self.host.environ
        if match[0] == "$$":
            return "$"
        if name is None:
            fix = f"${{{bare}}}" if bare else "${VAR} or ${VAR:-default}, or $$ for a dollar sign"
            self.error(key, f"'{match[0]}' is not expanded: write {fix}")
        elif default is not None:
            return environ.get(name) or default
        elif name in environ:
            return environ[name]
        else:
            add = self.error if self.host.here and not name.startswith("SLURM_") else self.warn
            fix = f"export it, or write ${{{name}:-}} where it may be undefined"
            add(key, f"${{{name}}} is not defined: {fix}{nearest(name, environ)}")
        return ""
