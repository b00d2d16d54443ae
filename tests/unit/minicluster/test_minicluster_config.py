"""The minicluster without a daemon: its configuration files, whole; folders, ports, bad input."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from minicluster import cli, cluster, config, machine
from minicluster.config import Cluster
from minicluster.processes import MARK
from support.place import ROOT
from support.refusals import refusal

GOLDEN = ROOT / "tests" / "golden" / "minicluster"
MC = {"root": Path("/tmp/mc"), "base_port": 7000, "first_job": 70000}
USUAL = Cluster(**MC)
FEW = {"nodes": 1, "cores": 2, "gpus": 0, "memory_mib": 900}
SMALL = Cluster(**MC, **FEW, accounting=False, memory_limits=True)
EVERYTHING = Cluster(**MC, nodes=3, gpus=1, preemption=True, memory_limits=True, subnet="10.77.3")


def test_every_file_of_slurm(monkeypatch) -> None:
    monkeypatch.setattr(config, "short_host", lambda: "laptop")
    for made, name, user in (
        (USUAL, "usual", "ada"),
        (SMALL, "small", "ada"),
        (EVERYTHING, "everything", "root"),
    ):
        monkeypatch.setattr(config, "user_name", lambda user=user: user)
        assert config.slurm_conf(made) == (GOLDEN / f"{name}.slurm.conf").read_text()
    monkeypatch.setattr(config, "user_name", lambda: "ada")
    assert config.slurmdbd_conf(USUAL, "secret") == (GOLDEN / "slurmdbd.conf").read_text()
    for made, text in (SMALL, ""), (USUAL, "n[1-4] gpu[0-3]"), (EVERYTHING, "n[1-3] gpu0"):
        line = "NodeName={} Name=gpu File=/tmp/mc/dev/{}\n".format(*text.split()) if text else ""
        assert config.gres_conf(made) == f"AutoDetect=off\n{line}"
    head, own = config.hosts(SMALL, "127.0.0.1 localhost\n").split("\n", 1)
    assert head.startswith("#") and own == "127.0.0.1 n1\n127.0.0.1 localhost\n"
    assert config.hosts(EVERYTHING, "").splitlines()[1:] == [
        "10.77.3.254 laptop", "10.77.3.1 n1", "10.77.3.2 n2", "10.77.3.3 n3",
    ]  # fmt: skip


def test_a_shell_is_pointed_at_it_without_another_clusters_settings(monkeypatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "theirs")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    made = machine.environment(Path("/tmp/mc"))
    assert not {"SBATCH_PARTITION", "SLURM_JOB_ID"} & made.keys()
    own = {"SLURM_CONF": "/tmp/mc/slurm.conf", "JOBKIT_MINICLUSTER_DIR": "/tmp/mc"}
    assert own.items() <= made.items()


def test_a_block_of_ports_that_is_free() -> None:
    largest = Cluster(**MC, nodes=config.MAX_NODES).ports()
    assert len(set(largest)) == len(largest) == 259 and max(largest) < 7300, "srun's begin there"
    one, other = (Cluster(root=Path("/tmp/jobkit-test-ports")) for _ in range(2))
    with machine.free_ports(one), machine.free_ports(other):
        assert abs(one.base_port - other.base_port) >= machine.PORTS_PER_BLOCK, "two at once"
    for port, same in ((one.slurmd_port(4), False), (one.slurmd_port(5), True)):
        with socket.create_server(("127.0.0.1", port)), machine.free_ports(other):
            assert (other.base_port == one.base_port) is same  # four nodes need no fifth port


# --- bad input ---

BAD = [
    (["up", "--nodes", "0"], "'0': must be a whole number, 1 or more, at most 256"),
    (["up", "--enforce", "--no-accounting"], "--enforce needs the accounting"),
]
FOLDERS = {"/tmp/my cluster": "choose a short path", "/tmp/" + "x" * 80: "choose a short path"}
FOLDERS |= {"/nowhere/at/all": "cannot be made there: No such file", "/etc/passwd": "not a folder"}


def test_bad_input_is_one_line_and_exit_2(capsys, monkeypatch) -> None:
    monkeypatch.setattr(machine, "check", lambda: None)  # the packages may be absent
    monkeypatch.setattr(machine, "may_have_network", lambda cluster: False)
    bad = [(argv, says, "/tmp/mc") for argv, says in BAD]
    for argv, says, folder in [*bad, *((["up"], says, path) for path, says in FOLDERS.items())]:
        monkeypatch.setenv(machine.DIR_VARIABLE, folder)
        said = refusal(cli.main, argv, capsys)
        assert says in said and said.startswith(("minicluster: ", "hpc/mini"))
    # No cluster is one line as well, and nothing for eval.
    monkeypatch.setenv(machine.DIR_VARIABLE, f"/tmp/mc-none-{os.getpid()}")
    assert cli.main(["env"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "hpc/minicluster up" in shown.err


def test_missing_packages_are_told_with_their_command(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(machine, "search_path", lambda: str(tmp_path))
    folder = Path(f"/tmp/mc-none-{os.getpid()}")  # a cluster's folder must have a short path
    monkeypatch.setenv(machine.DIR_VARIABLE, str(folder))
    assert cli.main(["up", "--no-accounting"]) == 2
    sudo = "" if os.geteuid() == 0 else "sudo "
    install = f"{sudo}apt-get install -y --no-install-recommends {' '.join(machine.PACKAGES)}\n"
    said = capsys.readouterr().err
    assert said.endswith(f"{sudo}apt-get update && {install}") and not folder.exists()


def test_a_machine_whose_network_has_all_addresses_lends_none(monkeypatch) -> None:
    for length, found in ((8, ""), (24, "10.77")):
        shown = json.dumps([{"addr_info": [{"local": "10.0.0.1", "prefixlen": length}]}])
        monkeypatch.setattr(machine, "ip", lambda *words, shown=shown: shown)
        assert machine.choose_subnet(Path("/tmp/mc")).rpartition(".")[0] == found


# A cluster's folder that a stranger made, or may change: nothing in it is believed.


@pytest.fixture
def root(monkeypatch):
    """A folder of our own that looks like a cluster that is up."""
    above = Path(tempfile.mkdtemp(prefix="mc", dir="/tmp"))  # short enough for Slurm's sockets
    made = above / "mc"
    made.mkdir(mode=0o755)
    Cluster(root=made).save()
    monkeypatch.setenv(machine.DIR_VARIABLE, str(made))
    monkeypatch.setattr(machine, "check", lambda: None)
    monkeypatch.setattr(machine.subprocess, "run", Mock(side_effect=AssertionError))
    yield made
    shutil.rmtree(above)


SQUATS = {
    "everybody writes": lambda root: root.chmod(0o757),
    "it can be exchanged": lambda root: root.parent.chmod(0o777),
    "a stranger's": lambda root: os.chown(root, 65534, 65534),
}


@pytest.mark.parametrize("squat", SQUATS)
def test_a_folder_that_others_may_change_is_refused(root, squat, capsys) -> None:
    if squat == "a stranger's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    cluster.check_folder(root, reading=True)  # one's own folder in /tmp is fine
    assert cluster.Cluster.load(root).nodes == 4
    SQUATS[squat](root)
    with subprocess.Popen(["cat"], env={MARK: f"{root}:slurmd.n1"}, stdin=-1) as victim:
        assert all(refusal(cli.main, [command], capsys) for command in ("down", "env", "up"))
        assert victim.poll() is None
        victim.kill()
    assert (root / "minicluster.json").exists()


def test_what_is_no_cluster_is_one_line(root: Path, capsys) -> None:
    """A file that is not to be read; and a folder with other files, which is left alone."""
    (root / "minicluster.json").write_text('{"format": 1}')
    assert cli.main(["env"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    (root / "minicluster.json").rename(root / "thesis")
    for command in ("up", "down", "env"):
        assert "holds other files" in refusal(cli.main, [command], capsys)
    assert (root / "thesis").exists()
