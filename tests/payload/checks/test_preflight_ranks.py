"""The preflight without Slurm: processes that meet, and where they could wait forever."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jobkit.checks.preflight import cli
from jobkit.checks.preflight import facts as preflight_facts
from jobkit.checks.preflight.messages import is_valid
from jobkit.checks.preflight.rendezvous import (
    Connection,
    Rendezvous,
    Unreachable,
    connect,
    listen,
    listener_or_connection,
)
from jobkit.payload.distributed import RankEnv
from jobkit.payload.slurm_env import default_port, ephemeral_ports
from support.no_torch import no_torch
from support.place import ROOT
from support.rigs import RUN_SH, environment

CHECK = [sys.executable, "-m", "jobkit.checks.preflight.cli", "--dataset", "synthetic"]


def free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def start(rank: int, world: int, port: int, *words: str, **env: str) -> subprocess.Popen[str]:
    """One rank of a group on this machine."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [*CHECK, *words],
        env=environment(**place, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ends(*ranks: subprocess.Popen[str], within_s: float = 600) -> list[tuple[int, str]]:
    """The codes of the ranks, and what they said."""
    found = []
    for rank in ranks:
        try:
            out, _ = rank.communicate(timeout=within_s)
        finally:
            rank.kill()
        found.append((rank.returncode, out))
    return found


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("JOBKIT_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def light(tmp_path: Path) -> dict[str, str]:
    """The environment of a rank that takes part in no group: it starts without torch."""
    return {"PYTHONPATH": f"{no_torch(tmp_path / 'stand-in')}{os.pathsep}{ROOT / 'src'}"}


def test_one_process_checks_its_machine() -> None:
    done = subprocess.run(
        [*CHECK, "--json", "--timeout", "300"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["ok"] and len(said["ranks"]) == 1
    assert {c["check"] for c in said["checks"]} >= {"ranks", "gpus", "cores", "data", "all_reduce"}


def test_two_groups_with_the_same_port_do_not_mix(light: dict[str, str]) -> None:
    """As two jobs with a MASTER_PORT set by hand: each rendezvous takes its own ranks only."""
    port = free_port()
    jobs = [
        [start(r, 2, port, "--timeout", "300", **light, SLURM_JOB_ID=job) for r in range(2)]
        for job in "78"
    ]
    said = [ends(*job) for job in jobs]
    reports = ["".join(out for _, out in job) for job in said]
    for report in reports:
        assert report.count("ok presence: 2 ranks connected") == 1, reports
        assert report.count("ok ranks: each rank once") == 1, reports


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "talks"])
def test_another_program_at_the_port_is_passed_by(silent: bool) -> None:
    port = free_port()
    taken = default_port(port, 1, ephemeral_ports())
    with socket.create_server(("", taken)) as other:

        def serve() -> None:
            while True:
                try:
                    connection, _ = other.accept()
                except OSError:
                    return
                kept.append(connection)
                if not silent:
                    connection.sendall(b"SSH-2.0-other\r\n")

        kept: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        said = ends(*(start(r, 2, port) for r in range(2)))
        for connection in kept:
            connection.close()
    assert [code for code, _ in said] == [0, 0], said
    assert kept, "the port was not tried"


def test_rank_0_never_connects(light: dict[str, str]) -> None:
    """Another process of the master's machine listens then, and names it."""
    ((code, out),) = ends(start(1, 2, free_port(), "--timeout", "20", **light))
    assert code == 5 and "presence: rank 0 on an unknown node: did not connect" in out, out


def told_to_end(after_s: float, light: dict[str, str]) -> tuple[int, str]:
    """What a rank that waits for another says when TERM comes, so long after it hears that."""
    one = start(0, 2, free_port(), "--timeout", "500", **light)
    status = Path(f"/proc/{one.pid}/status")
    while not int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) & 1 << 14:
        assert one.poll() is None
        time.sleep(0.05)
    time.sleep(after_s)
    one.terminate()
    ((code, out),) = ends(one)
    return code, out


def test_a_signal_has_the_coordinator_report_at_once(light: dict[str, str]) -> None:
    """srun ends the others when one rank fails: what is known must be said all the same."""
    for after_s in (0, 5, 50, 500):  # until it has looked at its own machine
        code, out = told_to_end(after_s, light)
        assert code == 5 and "Traceback" not in out, out
        if "stopped by a signal before any rank had reported" not in out:
            break
    assert "presence: rank 1" in out, out


def test_a_rank_that_ends_in_the_middle_is_named() -> None:
    """It sends its facts and goes; the others must not wait for its all_reduce."""
    port = free_port()
    one = start(0, 2, port, "--json", "--timeout", "60")
    program = (
        "import os, sys\nfrom jobkit.checks.preflight import rank as p\n"
        "p.PreflightRank._results = lambda *_: os._exit(9)\n"
        "from jobkit.checks.preflight.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    other = subprocess.Popen([sys.executable, "-c", program, *CHECK[3:]], env=environment(**env))
    ((code, out),) = ends(one)
    assert other.wait(100) == 9
    assert code == 5
    faults = [f for f in json.loads(out)["faults"] if f["check"] == "all_reduce"]
    assert any("rank 1 on" in f["where"] and "ended or hung" in f["what"] for f in faults), faults


def test_under_torchrun() -> None:
    words = ["--standalone", "--nproc-per-node", "2", "-m", *CHECK[2:]]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all checks passed") == 1
    assert "right over 2 ranks" in done.stdout and "2 ranks of a node" in done.stdout


def test_a_torch_that_cannot_be_imported_is_one_line(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    path = f"{tmp_path}{os.pathsep}{RUN_SH[1].removesuffix('run.sh')}src"
    done = subprocess.run(CHECK, env=environment(PYTHONPATH=path), capture_output=True, text=True)
    assert done.returncode == 5 and not done.stderr, done.stderr
    assert done.stdout.startswith("[preflight] FAULT versions: rank 0 on ")
    assert "libcudart.so.12" in done.stdout and done.stdout.count("\n") == 1


def test_bad_words_end_with_2(capsys, monkeypatch) -> None:
    assert cli.main(["--timeout", "7200"]) == 2
    assert cli.main(["--dataset", "cifar11"]) == 2
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 3 and "bash run.sh --preflight --dry-run" in said


# --- parts ----------------------------------------------------------------------------------------


NAME = {"rank": 3, "host": "n2"}


class Served:
    """A rendezvous in a thread of its own, and its port; any message of a stage is valid."""

    def __init__(self, token: str = "t", valid=lambda stage, message: True) -> None:
        self.loop = asyncio.new_event_loop()
        self.rendezvous = Rendezvous(token, valid)
        listener = listen(0)
        self.port = listener.getsockname()[1]
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.do(self.rendezvous.serve(listener))

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(300)

    def gather(self, stage: str, count: int, timeout_s: float) -> list[dict]:
        return self.do(self.rendezvous.gather(stage, count, timeout_s))

    def join(self, token: str = "t", **name) -> Connection:
        return connect("127.0.0.1", self.port, token, {**NAME, **name})


def test_the_clocks_offset_is_measured_over_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    served, real = Served(), time.time
    mine = threading.current_thread()
    ahead = lambda: real() + 3 * (threading.current_thread() is mine)  # noqa: E731
    monkeypatch.setattr(time, "time", ahead)
    clock = served.join().clock
    assert clock["clock_ahead_s"] == pytest.approx(3, abs=clock["clock_error_s"] + 0.01)
    assert 0 < clock["clock_error_s"] < 3


def test_an_absent_rendezvous_is_reported_in_time() -> None:
    port = free_port()
    with pytest.raises(Unreachable, match="Connection refused"):
        listener_or_connection(
            [port],
            lambda port: connect("127.0.0.1", port, "t", NAME),
            here=False,
            first=False,
            timeout_s=1,
        )


def test_a_rendezvous_does_not_take_another_jobs_rank_nor_tell_its_token() -> None:
    served = Served("job 7")
    with pytest.raises(Unreachable, match="another job"):
        served.join("job 8")
    with socket.create_connection(("127.0.0.1", served.port)) as stranger:
        stranger.sendall(b'{"hello": "job 7", "rank": 0, "host": "n1"}\n{"stage": "facts"}\n')
        assert stranger.recv(100) == b""
    assert served.gather("facts", 1, 0.3) == [] and served.rendezvous.connected == []


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(999) + b"\n",
        b"[" * 100_000 + b"\n",
        b"7\n",
        b"x" * (1 << 20),
        b"",
    ],
    ids=["http", "noise", "deep", "number", "long", "silent"],
)
def test_a_stranger_stops_nothing(sent: bytes) -> None:
    served = Served()
    with socket.create_connection(("127.0.0.1", served.port)) as stranger:
        stranger.settimeout(100)
        try:
            stranger.sendall(sent)
            served.join().send({"stage": "facts", "number": 1})
            assert [m["number"] for m in served.gather("facts", 1, 100)] == [1]
            assert stranger.recv(100) == b"", "it was answered"
        except ConnectionError:
            pass  # closed while it sent
    assert len(served.rendezvous.connected) == 1


def test_a_message_of_wrong_types_ends_its_connection() -> None:
    served = Served(valid=is_valid)
    with pytest.raises(Unreachable):
        served.join(rank="x")
    rank = served.join()
    rank.send({"stage": "facts", "rank": 3, "host": "n2"})
    with pytest.raises(ConnectionResetError):
        rank.receive(100)
    assert served.gather("facts", 1, 0.3) == []
    assert [hello["rank"] for hello in served.rendezvous.connected] == [3]


def test_a_stage_ends_when_all_who_are_left_have_answered() -> None:
    served = Served()
    ranks = [served.join() for _ in range(3)]
    for number, rank in enumerate(ranks):
        rank.send({"stage": "facts", "number": number})
    assert len(served.gather("facts", 3, 100)) == 3
    ranks[0].send({"stage": "results", "number": 0})
    ranks[1].close()
    threading.Timer(0.3, ranks[2].send, [{"stage": "results", "number": 2}]).start()
    before = time.monotonic()
    assert {m["number"] for m in served.gather("results", 3, 250)} == {0, 2}
    assert time.monotonic() - before < 200


def test_what_hangs_is_given_up_and_what_fails_is_raised() -> None:
    assert preflight_facts.within(0.1, lambda: time.sleep(600) or "late", "given up") == "given up"
    with pytest.raises(KeyError):
        preflight_facts.within(100, lambda: {}["x"], "")


def test_a_launcher_inside_a_step_has_ranks_of_its_own() -> None:
    """torchrun as the one task of a node: the step's tasks are not its ranks."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2"}
    place = RankEnv(rank=5, local_rank=1, world_size=8, local_world_size=4, master_addr="n1")
    found = preflight_facts.who(place, "", step)
    assert (found["tasks"], found["nodes"], found["host"]) == (2, ["n1", "n2"], "n2")
    assert preflight_facts.who(place, "", {**step, "TORCHELASTIC_RUN_ID": "x"})["tasks"] is None


def test_a_place_that_contradicts_itself_can_still_be_told() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]"}
    step |= {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    step |= {"SLURM_NTASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    place, fault = preflight_facts.claimed_place(step)
    assert "the step has 3 tasks, [2, 1] on its nodes" in fault
    assert (place.rank, place.world_size, place.master_addr) == (2, 3, "n1")
    place, fault = preflight_facts.claimed_place({"RANK": "x", "WORLD_SIZE": "2"})
    assert "cannot be read" in fault and place.world_size == 1


def test_a_cache_is_read_and_not_only_listed(tmp_path) -> None:
    assert preflight_facts.unreadable(tmp_path / "none") == "no such folder"
    assert preflight_facts.unreadable(tmp_path) == "no manifest.json in it"
    (tmp_path / "manifest.json").write_text('{"sha256": {"train_images": "1", "test_images": "2"}}')
    (tmp_path / "train_images").write_bytes(b"1")
    assert preflight_facts.unreadable(tmp_path) == "test_images: No such file or directory"
    (tmp_path / "test_images").write_bytes(b"")
    assert preflight_facts.unreadable(tmp_path) == "test_images: Invalid argument"
    (tmp_path / "test_images").write_bytes(b"1")
    assert preflight_facts.unreadable(tmp_path) == ""


def test_a_rank_that_hangs_before_it_can_say_anything_is_not_called_absent(
    light: dict[str, str],
) -> None:
    """It connected: so its node is up and reached, and something on it hangs."""
    port = free_port()
    hang = "import time\nfrom jobkit.checks.preflight import facts as f\n"
    hang += "f.gpu = lambda *_: time.sleep(600)\n"
    hang += "from jobkit.checks.preflight import rendezvous as r\nr._PATIENCE_S = 600\n"
    hang += "import sys\nfrom jobkit.checks.preflight.cli import main\nsys.exit(main(sys.argv[1:]))"
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(port), **light}
    words = [sys.executable, "-c", hang, "--timeout", "300"]
    other = subprocess.Popen(words, env=environment(**env))
    one = start(0, 2, port, "--timeout", "60", **light)
    ((code, out),) = ends(one)
    other.kill()
    assert code == 5 and "presence: rank 1 on" in out, out
    assert "connected but did not report within 60 s" in out
    assert "did not connect" not in out


def test_the_source_digest_sees_every_file(tmp_path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = preflight_facts.source_digest(tmp_path)
    assert preflight_facts.source_digest(tmp_path) == first
    (tmp_path / "b.py").write_text("")
    assert preflight_facts.source_digest(tmp_path) != first


def test_a_folder_is_tried_by_writing(tmp_path) -> None:
    assert preflight_facts.write_fault(tmp_path / "new") == ""
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    assert preflight_facts.write_fault(tmp_path / "file") == "File exists"
