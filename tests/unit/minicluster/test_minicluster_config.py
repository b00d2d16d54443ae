"""The minicluster without a daemon: its configuration files, whole; locks, ports, bad input."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minicluster import cli, config, layout, locks, machine, network
from minicluster.config import Options, Plan
from support.place import ROOT

GOLDEN = ROOT / "tests" / "golden" / "minicluster"
HERE = layout.Layout(Path("/tmp/jobkit-test-locks"))


def plan(options: Options, **differing: object) -> Plan:
    usual = {
        "layout": layout.Layout(Path("/tmp/mc")),
        "ports": layout.Ports(7000),
        "host": "laptop",
    }
    return Plan(
        options=options, **{**usual, "user": "ada", "database_password": "secret", **differing}
    )


USUAL = plan(Options())
SMALL = plan(
    Options(nodes=1, cores=2, gpus=0, memory_mib=900, accounting=False, memory_limits=True)
)
EVERYTHING = plan(
    Options(nodes=3, gpus=1, preemption=True, netns=True, memory_limits=True),
    user="root", subnet="10.77.3", names_resolve=True,
)  # fmt: skip


def test_slurm_conf() -> None:
    for name, made in {"usual": USUAL, "small": SMALL, "everything": EVERYTHING}.items():
        assert config.slurm_conf(made) == (GOLDEN / f"{name}.slurm.conf").read_text()


def test_the_other_files() -> None:
    assert config.slurmdbd_conf(USUAL) == (GOLDEN / "slurmdbd.conf").read_text()
    gpus = {SMALL: "", USUAL: "n[1-4] /tmp/mc/dev/gpu[0-3]", EVERYTHING: "n[1-3] /tmp/mc/dev/gpu0"}
    for made, text in gpus.items():
        line = "NodeName={} Name=gpu File={}\n".format(*text.split()) if text else ""
        assert config.gres_conf(made) == f"AutoDetect=off\n{line}"
    head, own = config.hosts(SMALL, "127.0.0.1 localhost\n").split("\n", 1)
    assert head.startswith("#") and own == "127.0.0.1 n1\n127.0.0.1 localhost\n"
    assert config.hosts(EVERYTHING, "").splitlines()[1:] == [
        "10.77.3.254 laptop", "10.77.3.1 n1", "10.77.3.2 n2", "10.77.3.3 n3",
    ]  # fmt: skip
    assert "secret" not in repr(USUAL) and "secret" in config.database_sql(USUAL)


def test_a_shell_is_pointed_at_it_without_another_clusters_settings(monkeypatch) -> None:
    own = {"SLURM_CONF": "/tmp/mc/slurm.conf", "JOBKIT_MINICLUSTER_DIR": "/tmp/mc"}
    assert machine.exports(layout.Layout(Path("/tmp/mc"))) == own
    monkeypatch.setenv("SBATCH_PARTITION", "theirs")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    made = machine.environment(layout.Layout(Path("/tmp/mc")))
    assert not {"SBATCH_PARTITION", "SLURM_JOB_ID"} & made.keys()
    assert own.items() <= made.items()


# --- locks and ports ---


def listen(port: int) -> socket.socket:
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", port))
    taken.listen()
    return taken


def test_ports_of_a_block_differ() -> None:
    used, steps = layout.Ports(7000).used(256), range(7300, 7400)
    assert len(set(used)) == len(used) == 259 and not set(used) & set(steps)
    assert max(used) < steps.start and layout.Ports(7000).steps == "7300-7399"
    assert steps.stop == 7000 + layout.PORTS_PER_BLOCK


def test_a_block_with_a_taken_port_is_passed_over() -> None:
    with locks.port_block(HERE, 4, None) as first, locks.port_block(HERE, 4, None) as second:
        assert abs(first.base - second.base) >= layout.PORTS_PER_BLOCK, "two at once"
    with listen(first.slurmd(4)), locks.port_block(HERE, 4, None) as third:
        assert third.base != first.base
    with listen(first.slurmd(5)), locks.port_block(HERE, 4, None) as fourth:
        assert fourth.base == first.base  # four nodes do not use the fifth's port


def test_a_chosen_block_that_is_taken_and_a_locked_folder_are_errors() -> None:
    is_taken = pytest.raises(layout.ClusterError, match="another `up` is taking it")
    with locks.port_block(HERE, 4, None) as free, is_taken:
        locks.port_block(HERE, 4, free.base).__enter__()
    with (
        listen(free.mariadb),
        pytest.raises(layout.ClusterError, match=f"port {free.mariadb} of its"),
    ):
        locks.port_block(HERE, 4, free.base).__enter__()
    with locks.port_block(HERE, 4, free.base) as chosen:
        assert chosen == free
    with locks.locked(HERE), pytest.raises(layout.ClusterError, match="wait for it"):
        locks.locked(HERE).__enter__()
    with locks.locked(HERE):  # it is free again
        pass


# --- bad input ---

BAD = [
    (["up", "--nodes", "0"], "--nodes 0: must be from 1 to 256"),
    (["up", "--nodes", "254", "--netns"], "--nodes 254: at most 253 with --netns"),
    (["up", "--cores=-1"], "--cores -1: must be from 1 to 1024"),
    (["up", "--memory", "1"], "--memory 1: must be from 64"),
    (["up", "--gpus", "many"], "argument --gpus: invalid int value: 'many'"),
    (["up", "--no-acc"], "unrecognized arguments: --no-acc"),
    (["up", "--enforce", "--no-accounting"], "--enforce needs the accounting"),
    (["up", "--dir", "/tmp/my cluster"], "no spaces"),
    (["up", "--dir", "/tmp/" + "x" * 80], "85 bytes are too long"),
    (["up", "--dir", "/nowhere/at/all"], "the folder above it does not exist"),
    (["up", "--dir", "/etc/passwd"], "not a folder"),
    (["up", "--dir", "/tmp/mc", "--port", "80"], "--port 80: must be from 1024"),
    ([], "required: COMMAND"),
    (["start"], "the following arguments are required: NODE|slurmctld"),
    (["link", "mend", "n1"], "invalid choice: 'mend'"),
]


def test_bad_input_is_one_line_and_exit_2(capsys, monkeypatch) -> None:
    monkeypatch.setattr(machine, "check_packages", lambda options: None)
    for argv, says in BAD:
        assert cli.main(argv) == 2, argv
        shown = capsys.readouterr()
        assert shown.out == "" and says in shown.err
        assert shown.err.startswith("minicluster: error: ") and shown.err.count("\n") == 1
    # No cluster is one line as well, and nothing for eval.
    assert cli.main(["env", "--dir", f"/tmp/mc-none-{os.getpid()}"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "hpc/minicluster up" in shown.err
    longest = "/" + "x" * (layout.MAX_ROOT_BYTES - 1)
    assert layout.check_root(longest) == Path(longest)
    with pytest.raises(layout.UsageError, match="too long"):
        layout.check_root(longest + "x")


def test_words_of_links() -> None:
    for words, says in (
        ("cut n2", "n2 cut from everything"),
        ("cut n1 n2", "n1 and n2 cut from each other"),
        ("slow n2 10mbit", "n2 slowed to 10mbit"),
        ("cut", "one node, or two"),
        ("cut n1 n1", "one node, or two"),
        ("cut n1 n2 n3", "one node, or two"),
        ("cut n4", "n4: no such node; there are n1 to n3"),
        ("slow n1", "a node and a rate"),
        ("slow n1 10", "write a number and kbit, mbit or gbit"),
        ("slow n1 0mbit", "write a number and kbit, mbit or gbit"),
        ("slow 10mbit n1", "10mbit: no such node"),
    ):
        action, *rest = words.split()
        try:
            said = str(network.parse(action, rest, ["n1", "n2", "n3"]))
        except layout.UsageError as error:
            said = str(error)
        assert says in said


def test_missing_packages_are_told_with_their_command(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(machine, "search_path", lambda: str(tmp_path))
    folder = Path(f"/tmp/mc-none-{os.getpid()}")  # a cluster's folder must have a short path
    assert cli.main(["up", "--no-accounting", "--dir", str(folder)]) == 2
    sudo = "" if os.geteuid() == 0 else "sudo "
    install = f"{sudo}apt-get install -y --no-install-recommends slurm-wlm munge util-linux"
    said = capsys.readouterr().err.splitlines()
    assert said[1:] == [f"  {sudo}apt-get update && {install}"] and not folder.exists()
    assert set(machine.packages(Options(netns=True))) == set(machine.PACKAGES)


def test_it_imports_the_standard_library_only() -> None:
    """With -I and -S: no site-packages, no PYTHONPATH; and torch and the like are not missed."""
    argv = [sys.executable, "-I", "-S", str(ROOT / "hpc" / "minicluster"), "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 'eval "$(hpc/minicluster env)"' in done.stdout
