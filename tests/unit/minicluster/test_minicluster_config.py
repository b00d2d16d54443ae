"""The minicluster's configuration files, compared whole; and what it says to bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minicluster import cli, config, links, machine, slurm, state
from minicluster.config import Options, Plan
from minicluster.errors import UsageError
from minicluster.layout import (
    MAX_ROOT_BYTES,
    PORTS_PER_BLOCK,
    Layout,
    Ports,
    blocks_of,
    check_root,
)
from support.place import ROOT

GOLDEN = ROOT / "tests" / "golden" / "minicluster"


def plan(**differing: object) -> Plan:
    usual = {
        "options": Options(),
        "layout": Layout(Path("/tmp/mc")),
        "ports": Ports(7000),
        "host": "laptop",
        "user": "ada",
        "database_password": "secret",
    }
    return Plan(**{**usual, **differing})


USUAL = plan()
SMALL = plan(
    options=Options(nodes=1, cores=2, gpus=0, memory_mib=900, accounting=False, memory_limits=True)
)
EVERYTHING = plan(
    options=Options(nodes=3, gpus=1, preemption=True, netns=True, memory_limits=True),
    user="root",
    subnet="10.77.3",
    names_resolve=True,
)


@pytest.mark.parametrize(
    ("name", "made"), [("usual", USUAL), ("small", SMALL), ("everything", EVERYTHING)]
)
def test_slurm_conf(name: str, made: Plan) -> None:
    assert config.slurm_conf(made) == (GOLDEN / f"{name}.slurm.conf").read_text()


def test_slurmdbd_conf() -> None:
    assert config.slurmdbd_conf(USUAL) == (GOLDEN / "slurmdbd.conf").read_text()


def test_gres_conf() -> None:
    assert config.gres_conf(USUAL) == (
        "AutoDetect=off\nNodeName=n[1-4] Name=gpu File=/tmp/mc/dev/gpu[0-3]\n"
    )
    assert config.gres_conf(EVERYTHING) == (
        "AutoDetect=off\nNodeName=n[1-3] Name=gpu File=/tmp/mc/dev/gpu0\n"
    )
    assert config.gres_conf(SMALL) == "AutoDetect=off\n"


@pytest.mark.parametrize("made", [USUAL, EVERYTHING])
def test_cgroup_conf(made: Plan) -> None:
    """No machine's own cgroups, whatever the options."""
    assert config.cgroup_conf(made).splitlines()[-3:] == [
        "CgroupPlugin=cgroup/v1",
        "CgroupMountpoint=/tmp/mc/run",
        "CgroupAutomount=no",
    ]


def test_hosts() -> None:
    head = "# Written by hpc/minicluster; jobs see it as /etc/hosts.\n"
    own = "127.0.0.1 localhost\n"
    assert config.hosts(SMALL, own) == f"{head}127.0.0.1 n1\n{own}"
    assert config.hosts(EVERYTHING, own) == (
        f"{head}10.77.3.254 laptop\n10.77.3.1 n1\n10.77.3.2 n2\n10.77.3.3 n3\n{own}"
    )


def test_the_password_is_not_shown() -> None:
    assert "secret" not in repr(USUAL)
    assert "secret" in config.database_sql(USUAL)


def test_ports_of_a_block_differ() -> None:
    ports = Ports(7000)
    used = ports.used(256)
    assert len(set(used)) == len(used) == 259
    assert ports.steps == "7100-7199"
    assert not set(used) & set(range(7100, 7200))
    assert max(used) < 7000 + blocks_of(256) * PORTS_PER_BLOCK
    for block in (7200, 7400):  # a cluster of one node sees that the further blocks are taken
        assert set(used) & set(Ports(block).used(1))


def test_env_lines_name_the_cluster() -> None:
    assert slurm.exports(Layout(Path("/tmp/mc"))) == {
        "SLURM_CONF": "/tmp/mc/slurm.conf",
        "JOBKIT_MINICLUSTER_DIR": "/tmp/mc",
    }


def test_another_clusters_settings_do_not_reach_the_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "theirs")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    made = slurm.environment(Layout(Path("/tmp/mc")))
    assert not {"SBATCH_PARTITION", "SLURM_JOB_ID"} & made.keys()
    assert made["SLURM_CONF"] == "/tmp/mc/slurm.conf"


BAD = [
    (["up", "--nodes", "0"], "--nodes 0: must be from 1 to 256"),
    (["up", "--nodes", "257"], "--nodes 257: must be from 1 to 256"),
    (["up", "--nodes", "254", "--netns"], "--nodes 254: at most 253 with --netns"),
    (["up", "--cores=-1"], "--cores -1: must be from 1 to 1024"),
    (["up", "--gpus", "65"], "--gpus 65: must be from 0 to 64"),
    (["up", "--memory", "1"], "--memory 1: must be from 64"),
    (["up", "--gpus", "many"], "argument --gpus: invalid int value: 'many'"),
    (["up", "--no-acc"], "unrecognized arguments: --no-acc"),
    (["up", "--dir", "/tmp/my cluster"], "no spaces"),
    (["up", "--dir", "/tmp/x,y"], "use letters, digits"),
    (["up", "--dir", "/tmp/" + "x" * 80], "85 bytes are too long"),
    (["up", "--dir", "/nowhere/at/all"], "the folder above it does not exist"),
    (["up", "--dir", "/etc/passwd"], "not a folder"),
    (["up", "--dir", "/tmp/mc", "--port", "80"], "--port 80: must be from 1024"),
    ([], "required: COMMAND"),
    (["begin"], "invalid choice: 'begin'"),
    (["start"], "the following arguments are required: NODE|slurmctld"),
    (["link", "mend", "n1"], "invalid choice: 'mend'"),
]


@pytest.mark.parametrize(("argv", "says"), BAD, ids=[" ".join(argv) or "none" for argv, _ in BAD])
def test_bad_input_is_one_line_and_exit_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "check_packages", lambda options: None)
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("minicluster: error: ") and shown.err.count("\n") == 1
    assert says in shown.err


def test_the_longest_folder_is_taken() -> None:
    longest = "/" + "x" * (MAX_ROOT_BYTES - 1)
    assert check_root(longest) == Path(longest)
    with pytest.raises(UsageError, match="too long"):
        check_root(longest + "x")


def test_missing_packages_end_with_the_command_to_install_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "search_path", lambda: str(tmp_path))
    folder = Path(f"/tmp/mc-none-{os.getpid()}")  # a cluster's folder must have a short path
    assert cli.main(["up", "--no-accounting", "--dir", str(folder)]) == 2
    shown = capsys.readouterr()
    sudo = "" if os.geteuid() == 0 else "sudo "
    install = f"{sudo}apt-get install -y --no-install-recommends slurm-wlm munge util-linux"
    assert shown.err.splitlines()[1:] == [f"  {sudo}apt-get update && {install}"]
    assert not folder.exists()


def test_accounting_and_netns_need_more_packages() -> None:
    assert machine.packages(Options(accounting=False)) == ["slurm-wlm", "munge", "util-linux"]
    assert set(machine.packages(Options(netns=True))) == set(machine.PACKAGES)


def test_the_next_commands_after_sudo_name_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOBKIT_MINICLUSTER_DIR", "/tmp/mc")
    monkeypatch.delenv("SUDO_UID", raising=False)
    made = state.State(options=Options(netns=True), base_port=7000)
    layout = Layout(Path("/tmp/mc"))
    plain = cli._summary(layout, made, "made", 1.23).splitlines()
    assert plain[0] == ("up: n[1-4] idle, each 8 cores, 4 GPUs, 4000 MiB; ports from 7000; 1.2 s")
    assert plain[-2:] == ["  hpc/minicluster link cut n1", "  hpc/minicluster down"]
    monkeypatch.setenv("SUDO_UID", "1000")
    by_sudo = cli._summary(layout, made, "made", 1.23)
    assert '  eval "$(hpc/minicluster env --dir /tmp/mc)"' in by_sudo.splitlines()
    assert by_sudo.endswith("\n  sudo hpc/minicluster down --dir /tmp/mc")


NODES = ["n1", "n2", "n3"]


def test_link_words() -> None:
    assert str(links.parse("cut", ["n2"], NODES)) == "n2 cut from everything"
    assert str(links.parse("cut", ["n1", "n2"], NODES)) == "n1 and n2 cut from each other"
    assert str(links.parse("slow", ["n2", "10mbit"], NODES)) == "n2 slowed to 10mbit"


@pytest.mark.parametrize(
    ("action", "words", "says"),
    [
        ("cut", [], "one node, or two"),
        ("cut", ["n1", "n1"], "one node, or two"),
        ("cut", ["n1", "n2", "n3"], "one node, or two"),
        ("cut", ["n4"], "n4: no such node; there are n1 to n3"),
        ("slow", ["n1"], "a node and a rate"),
        ("slow", ["n1", "10"], "write a number and kbit, mbit or gbit"),
        ("slow", ["n1", "0mbit"], "write a number and kbit, mbit or gbit"),
        ("slow", ["10mbit", "n1"], "10mbit: no such node"),
    ],
)
def test_link_words_without_sense(action: str, words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        links.parse(action, words, NODES)


def test_help_has_examples_and_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    assert 'eval "$(hpc/minicluster env)"' in capsys.readouterr().out


def test_it_imports_the_standard_library_only() -> None:
    """With -I and -S: no site-packages, no PYTHONPATH; and torch and the like are not missed."""
    argv = [sys.executable, "-I", "-S", str(ROOT / "hpc" / "minicluster"), "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
