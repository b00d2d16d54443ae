"""Whether ranks work together is seen in real processes: copies, connections, shared memory."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobkit.launch import together
from jobkit.launch.together import Watch, evidence_of, ranks_of

READY = "print('ready', flush=True); sys.stdin.read()"
ALONE = f"import sys; {READY}"
# Each of these connects to itself, as a program with a service of its own does.
SELF = f"""
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname()); peer, _ = server.accept()
{READY}
"""
CONNECTED = f"""
import os, socket, sys
path = sys.argv[1] + "/port"
if os.environ["RANK"] == "0":
    server = socket.create_server(("127.0.0.1", 0))
    open(path + ".new", "w").write(str(server.getsockname()[1])); os.rename(path + ".new", path)
    peer, _ = server.accept()
else:
    import time
    while not os.path.exists(path): time.sleep(0.01)
    client = socket.create_connection(("127.0.0.1", int(open(path).read())))
{READY}
"""
SHARED = f"""
import mmap, os, sys
file = os.open("/dev/shm/" + os.path.basename(sys.argv[1]), os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096); memory = mmap.mmap(file, 4096)
{READY}
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    ranks: list[subprocess.Popen[str]] = []

    def start(program: str) -> Path:
        for rank in (0, 1):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "JOBKIT_RUN_DIR": str(tmp_path)}
            words = [sys.executable, "-c", program, str(tmp_path)]
            env = os.environ | own
            ranks.append(subprocess.Popen(words, env=env, stdin=-1, stdout=-1, text=True))
        for process in ranks:
            assert process.stdout and process.stdout.readline() == "ready\n"
        return tmp_path

    yield start
    for process in ranks:
        process.communicate(timeout=120)
    Path("/dev/shm", tmp_path.name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("program", "evidence"),
    [(ALONE, ""), (SELF, ""), (CONNECTED, "connection"), (SHARED, "shared memory")],
    ids=["copies", "copies with a service", "connected", "shared memory"],
)
def test_what_shows_that_ranks_work_together(started, program, evidence) -> None:
    pids, size = ranks_of(str(started(program)))
    assert (sorted(pids), size) == ([0, 1], 2)
    assert evidence_of(pids) == evidence


def test_only_a_connection_that_comes_in_is_evidence(monkeypatch) -> None:
    """Of two nodes with a rank each, only one end is seen."""
    port, node, own = "7530", "0200000A", "0100000A"  # 10.0.0.2 and 10.0.0.1

    def seen(*connections: tuple[str, str, str], nodes: frozenset[str] = frozenset()) -> str:
        monkeypatch.setattr(together, "_connections", lambda _: connections)
        return evidence_of({0: [os.getpid()]}, nodes)

    listens = (f"00000000:{port}", "00000000:0000", "0A")
    accepted = (f"{own}:{port}", f"{node}:9999", "01")
    goes_out = (f"{own}:8888", f"{node}:01BB", "01")
    to_itself = (f"0100007F:{port}", "0100007F:9999", "01")
    assert seen(listens, accepted) == "connection"
    assert seen(listens, goes_out) == seen(listens, to_itself) == seen(listens) == ""
    assert seen(goes_out, nodes=frozenset({node})) == "connection"


def test_copies_are_said_after_some_looks_and_nothing_of_one_rank(started, monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(together.time, "monotonic", lambda: clock[0])
    watch = Watch(started(ALONE))
    for _ in range(3):
        assert watch.found is None
        clock[0] += together.LAST_LOOK_S
        watch.look()
    assert (watch.found, watch.ranks) == ("none", 2)
    single = Watch(Path("/nowhere"))
    clock[0] += together.LAST_LOOK_S
    single.look()
    assert single.found is None


def test_all_addresses_of_a_node_are_known(monkeypatch) -> None:
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*kind, (address, 0)) for address in ("10.0.0.2", "192.168.1.2")]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n2")
    monkeypatch.setattr(together.slurm_jobs, "output", lambda _: "n2\n")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert together._addresses_of_job.__wrapped__() == {"0200000A", "0201A8C0"}
