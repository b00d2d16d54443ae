"""The simulated counter of a node's energy: 100 W, in files as those of HPE Cray EX.

    python src/minicluster/counter.py FOLDER

It writes until it is ended. The nodes all read it: each seems to use 100 W.
"""

import os
import sys
import time
from pathlib import Path

WATT = 100
BEGIN_J = 1000  # a real one has counted since the node was started
INTERVAL_S = 0.1  # as on the real machine
FILES = {"power": f"{WATT} W 0 us\n", "version": "2\n", "raw_scan_hz": "10\n", "generation": "1\n"}


def reading(seconds: float) -> str:
    """The content of the file `energy` so long after the start; it never gets shorter."""
    return f"{BEGIN_J + int(WATT * seconds)} J {int(seconds * 1e6)} us\n"


def main(folder: Path) -> None:
    """Make the files, and keep the counter going."""
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    begin = time.monotonic()
    file = os.open(folder / "energy", os.O_WRONLY | os.O_CREAT, 0o644)
    while folder.exists():
        # One write over the whole of it: no reader sees a part.
        os.pwrite(file, reading(time.monotonic() - begin).encode(), 0)
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
