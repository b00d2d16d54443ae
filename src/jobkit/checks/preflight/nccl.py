"""What NCCL itself says of the ways between the ranks: its log, kept for the preflight's group.

The lines are written where NCCL connects two ranks, at level INFO of NCCL_DEBUG
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug); RCCL has the same.
Sample lines: tests/unit/checks/test_preflight_nccl.py, with their sources.
"""

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.files import MOST_TEXT, open_regular

_VIA = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(?:send|receive)\])? via (\S.*)"
)
_NETWORK = re.compile(r"NCCL INFO Using network (\S.*)")
_MOST_LINKS = 64  # of one rank in its message: rings and trees have a few


def keep_log(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Have NCCL write what it connects into a file of this process; return the file.

    To be called before NCCL is initialised. A file that the user named is kept as it is, with
    their level. NCCL replaces %h and %p by host and process.
    """
    if "NCCL_DEBUG_FILE" not in environ:
        folder = tempfile.mkdtemp(prefix="jobkit-preflight-")
        environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=f"{folder}/nccl-%h-%p.log")
        environ.pop("NCCL_DEBUG_SUBSYS", None)  # its default has what is read here
    name = environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))
    return Path(name.replace("%h", socket.gethostname().split(".")[0]))


class Log:
    """The log of this process, read in parts: each group's lines have ranks of that group."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new_text(self) -> str:
        """Return what was added since the last call; nothing where it cannot be read."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                content = file.read(MOST_TEXT)
        except OSError:
            return ""
        self._offset += len(content)
        return content.decode(errors="replace")

    def remove(self, own: bool) -> None:
        """Remove the file and its folder, where they are this process's own."""
        if own:  # a thread that hangs in NCCL may hold it open still
            shutil.rmtree(self._path.parent, ignore_errors=True)


@dataclass(frozen=True)
class Link:
    """How NCCL connected two ranks."""

    first: int
    second: int
    kind: str  # as NET/IB, NET/Socket, P2P/CUMEM, SHM
    direct: bool = False  # the network reads the GPU's memory itself (GDRDMA)

    def encode(self) -> str:
        """Return it as a text of a message."""
        return f"{self.first} {self.second} {int(self.direct)} {self.kind}"

    @classmethod
    def decode(cls, text: str) -> "Link":
        """Return it from a text; raises ValueError."""
        first, second, direct, kind = text.split(" ", 3)
        return cls(int(first), int(second), kind, direct == "1")


def links(text: str, members: Sequence[int]) -> list[Link]:
    """Return the links in a log, each once; members: the job's rank of each rank of the group."""
    found: dict[Link, None] = {}
    for match in _VIA.finditer(text):
        ranks = sorted(int(number) for number in match.group(1, 2))
        if ranks[1] >= len(members):
            continue  # of another group
        way = match[3].strip()
        parts = way.split("/")
        kind = "SHM" if parts[0] == "SHM" else "/".join(parts[:2])
        pair = (members[ranks[0]], members[ranks[1]])
        found[Link(*pair, kind, "GDRDMA" in parts)] = None
    return list(found)


def said(text: str, members: Sequence[int]) -> dict[str, Any]:
    """Return what a rank's log says, as fields of a message: links and networks."""
    return {
        "links": [link.encode() for link in links(text, members)][:_MOST_LINKS],
        "networks": list(dict.fromkeys(name.strip()[:60] for name in _NETWORK.findall(text))),
    }


def joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two parts of a log say together."""
    both = {**one, **other}
    for name in ("links", "networks"):
        both[name] = list(dict.fromkeys([*one[name], *other[name]]))[:_MOST_LINKS]
    return both
