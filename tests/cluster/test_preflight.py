"""The preflight as a job: a sound allocation, and faults that are injected into real steps."""

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from jobkit.payload.slurm_env import expand_nodes
from support.checkout import ROOT, TINY, Checkout, make_checkout
from support.no_torch import no_torch

CHECK = "python -m jobkit.checks.preflight.cli"
# Every process of the step runs a line of shell first; "$@" are the preflight's arguments.
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


class Injected:
    """Runs the preflight as a step, with a fault injected before it starts."""

    def __init__(self, cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.env = {
            **make_checkout(folder / "kit", folder / "data").env,
            "PYTHONPATH": str(ROOT / "src"),
        }
        # Of ranks that are told apart by what they are given, and compute nothing together.
        self.light = {"PYTHONPATH": f"{no_torch(folder / 'stand-in')}:{ROOT / 'src'}"}

    def step(self, inject: str, *words: str, size=TWO_NODES, **env: str):
        """srun of the injection and the preflight, on every rank."""
        first = "[ $SLURM_PROCID != 0 ] || echo NODES=$SLURM_STEP_NODELIST\n"
        line = first + inject.replace("CHECK", f'{CHECK} "$@"')
        argv = ["srun", "-K1", *size, "bash", "-c", line, "x", *words]
        more = [] if "--timeout" in words else ["--timeout", "300"]  # the ranks are sound
        more += [] if "--" in words else ["--", "--dataset", "synthetic"]
        return self.cluster.run(*argv, *more, env=self.env | env, timeout=900)

    def faults(self, inject: str, *words: str, code: int | None = 5, **more) -> str:
        """The lines of the faults, in which the step's nodes are n1 and n2, whichever it got."""
        done = self.step(inject, *words, **more)
        # Where each rank fails by itself, srun may have to end the last one, and says 143.
        assert done.returncode in ((code,) if code else (5, 143)), done.stdout + done.stderr
        nodes, *lines = sorted(done.stdout.splitlines(), key=lambda text: "NODES=" not in text)
        names = expand_nodes(nodes.removeprefix("NODES="))
        text = "\n".join(line for line in lines if "FAULT" in line)
        return re.sub(r"\bn[1-4]\b", lambda name: f"n{names.index(name[0]) + 1}", text)


@pytest.fixture(scope="module")
def injected(cluster, tmp_path_factory) -> Injected:
    return Injected(cluster, tmp_path_factory.mktemp("preflight"))


@pytest.fixture(scope="module")
def apart(make_cluster, tmp_path_factory) -> Injected:
    """Nodes with addresses of their own."""
    if os.geteuid() != 0:
        pytest.skip("--netns needs root")
    networked = make_cluster("--netns", "--no-accounting", "--nodes=2")
    return Injected(networked, tmp_path_factory.mktemp("apart"))


def test_a_sound_allocation_is_measured(injected: Injected) -> None:
    done = injected.step("CHECK", "--json", size=("--nodes=2", "--ntasks-per-node=2"))
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout[done.stdout.index("{") :])
    assert said["ok"] and said["exit_code"] == 0 and said["faults"] == []
    assert [f["rank"] for f in said["ranks"]] == [0, 1, 2, 3]
    assert [(f["local_rank"], f["local_world_size"]) for f in said["ranks"]] == [(0, 2), (1, 2)] * 2
    assert len({f["host"] for f in said["ranks"]}) == 2
    measured = {check["check"]: check["measured"] for check in said["checks"]}
    assert "right over 4 ranks" in measured["all_reduce"] and "us" in measured["all_reduce"]
    assert "GB/s between 2 nodes" in measured["bandwidth"]
    assert measured.pop("transports") == "", "only NCCL says which way it takes"
    assert all(measured.values()), measured
    left = [*(injected.folder / "kit/logs").rglob(".preflight*"), *injected.folder.glob("data/.*")]
    assert not left


def test_run_sh_checks_first_and_trains_only_a_sound_allocation(cluster, tmp_path) -> None:
    kit: Checkout = make_checkout(tmp_path / "kit", tmp_path / "data")
    words = ["--nodes=2", "--ntasks-per-node=1", "run.sh", "--preflight", *TINY]
    good = kit.sbatch(cluster, *words)
    with socket.create_server(("", 0)) as holder:
        port = str(holder.getsockname()[1])
        bad = kit.sbatch(cluster, *words, MASTER_PORT=port)
        assert cluster.wait(bad, 300) == ("FAILED", "5:0"), kit.log(bad)
    assert cluster.wait(good, 300) == ("COMPLETED", "0:0"), kit.log(good)
    assert "[preflight] all checks passed" in kit.log(good)
    assert kit.records(good, "epoch")
    (fault,) = [line for line in kit.log(bad).split("\n") if "FAULT" in line]
    assert f"port {port} cannot be used: Address already in use" in fault and "ss -ltnp" in fault
    assert "nothing was trained" in kit.log(bad) and "[METRIC]" not in kit.log(bad)


def test_all_ranks_think_that_they_are_0(injected: Injected) -> None:
    said = injected.faults("SLURM_PROCID=0 SLURM_LOCALID=0 exec CHECK", **injected.light)
    assert "ranks: n1 (1), n2 (1): 2 processes believe that they are rank 0; fix:" in said


def test_torchs_variables_of_the_batch_script_reach_every_rank(injected: Injected) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "n1"}
    said = injected.faults("CHECK", **env, **injected.light, MASTER_PORT="12399")
    assert "2 processes believe that they are rank 0" in said


@pytest.mark.parametrize(
    ("inject", "text"),
    [
        ("SLURM_NTASKS=3 exec CHECK", "SLURM_NTASKS is 3 and the step has 2 tasks"),
        (
            "RANK=$SLURM_PROCID WORLD_SIZE=4 LOCAL_WORLD_SIZE=1 MASTER_PORT=12398 exec CHECK",
            "rank 0 on n1, rank 1 on n2: world size is 4 and the step has 2 tasks",
        ),
    ],
    ids=["slurm", "torch"],
)
def test_a_world_size_that_is_wrong(injected: Injected, inject: str, text: str) -> None:
    said = injected.faults(inject, **injected.light, MASTER_ADDR="n1")
    assert text in said and "--ntasks-per-node" in said


def test_one_core_too_many_threads_and_one_gpu(injected: Injected, tmp_path: Path) -> None:
    """Each has a line of its own. The GPUs are fakes, in the Python of the ranks."""
    fake = "import types, torch\ntorch.cuda.device_count = lambda: 1\n"
    fake += "found = types.SimpleNamespace(uuid='GPU-abc', name='Fake')\n"
    fake += "torch.cuda.get_device_properties = lambda index: found\n"
    (tmp_path / "sitecustomize.py").write_text(fake)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "OMP_NUM_THREADS": "512"}
    said = injected.faults("exec taskset -c 0 CHECK", size=("--nodes=1", "--ntasks=2"), **env)
    assert "cores: ranks 0-1 on n1: all share 1 core (0) of " in said and "--cpu-bind" in said
    assert "cores: ranks 0-1 on n1: 512 threads on 1 core; fix: OMP_NUM_THREADS=1" in said
    assert "gpus: ranks 0-1 on n1: 2 ranks are on one GPU, GPU-abc (host n1); fix: ask" in said
    assert said.count("FAULT") == 3


def test_other_code_on_one_node_and_a_wrong_clock_on_another(injected: Injected, tmp_path) -> None:
    """The clock is a fake, in the Python of that rank: a kernel has one."""
    shutil.copytree(ROOT / "src/jobkit", tmp_path / "1/jobkit")
    with (tmp_path / "1/jobkit/errors.py").open("a") as file:
        file.write("# an edit that did not reach the other nodes\n")
    shift = "import time\nreal = time.time\ntime.time = lambda: real() - 7\n"
    (tmp_path / "2").mkdir()
    (tmp_path / "2/sitecustomize.py").write_text(shift)
    inject = f"PYTHONPATH='{tmp_path}'/$SLURM_PROCID:$PYTHONPATH exec CHECK"
    said = injected.faults(inject, size=("--nodes=3", "--ntasks-per-node=1"))
    assert re.search(r"versions: rank 1 on n2: jobkit is 0\.\S+ \(source \w{12}\), and 0", said)
    assert "clocks: rank 2 on n3: the clock is 7.0 s behind; fix:" in said
    assert said.count("FAULT") == 2


def test_a_rank_that_never_connects_is_named(injected: Injected) -> None:
    """srun ends with 143 then, because it has to end that rank; the line is what counts."""
    inject = "[ $SLURM_PROCID = 1 ] && exec sleep 900; exec CHECK"
    said = injected.faults(inject, "--timeout", "20", code=143, **injected.light)
    assert "presence: rank 1 on n2: did not connect within 20 s; fix: check n2" in said


def test_a_master_that_does_not_resolve(injected: Injected) -> None:
    away = {"MASTER_ADDR": "no-such-host.invalid", **injected.light}
    said = injected.faults("exec CHECK", code=None, **away)
    assert "no-such-host.invalid cannot be reached (the name does not resolve" in said


def test_a_log_folder_that_one_node_cannot_write(injected: Injected, tmp_path: Path) -> None:
    (tmp_path / "1").write_text("a file where the folder should be")
    said = injected.faults(f"exec CHECK --run-dir '{tmp_path}'/$SLURM_PROCID")
    assert f"logs: rank 1 on n2: {tmp_path}/1 cannot be written: File exists; fix:" in said


@needs_root
def test_folders_that_one_node_sees_for_itself(injected: Injected, tmp_path: Path) -> None:
    """Another file system lies over them on n2, as where home is a local disk."""
    logs, data = tmp_path / "logs", tmp_path / "data"
    logs.mkdir()
    data.mkdir()
    hide = f"mount -t tmpfs none '{logs}' && mount -t tmpfs none '{data}'"
    script = tmp_path / "one.sh"
    script.write_text(f'[ $SLURM_PROCID = 0 ] || {{ {hide}; }}\nexec {CHECK} "$@"\n')
    said = injected.faults(
        f"exec unshare -m bash '{script}' \"$@\"", "--run-dir", str(logs), "--data-dir", str(data)
    )
    assert f"shared: rank 1 on n2: {logs} is another folder here" in said
    assert f"data: rank 1 on n2: {data} is not the one of rank 0" in said


def test_a_log_folder_of_each_node_and_no_data(injected: Injected, tmp_path: Path) -> None:
    inject = f"exec CHECK --run-dir '{tmp_path}'/$SLURM_PROCID"
    said = injected.faults(inject, "--dataset", f"folder:{tmp_path}/none")
    assert "shared: rank 1 on n2: " in said and "is another folder here" in said
    assert f"data: rank 0 on n1: {tmp_path}/none: no such directory" in said
    assert "python -m jobkit prepare" in said and said.count("FAULT") == 2


# --- nodes with addresses of their own ------------------------------------------------------------


def test_nodes_apart_are_sound(apart: Injected) -> None:
    done = apart.step("exec CHECK")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "master: n1:" in done.stdout and " is 10." in done.stdout


def hosts(apart: Injected, name: str, line: str) -> Path:
    """The nodes' /etc/hosts with a line of the name changed."""
    now = apart.cluster.run("srun", "-N1", "-n1", "cat", "/etc/hosts").stdout.splitlines()
    kept = [text for text in now if name not in text.split()[1:]]
    path = apart.folder / f"hosts-{name}"
    path.write_text("\n".join([*kept, line, ""]))
    return path


@pytest.mark.parametrize(
    ("name", "on", "text"),
    [
        ("n2", 1, "master: rank 1 on n2: its own name n2 resolves to 127.0.1.1: Gloo would offer"),
        ("n1", 0, "master: rank 0 on n1: the master's name n1 resolves to 127.0.1.1 between nodes"),
    ],
    ids=["own", "master"],
)
def test_a_name_that_is_loopback_between_nodes(apart: Injected, name, on: int, text: str) -> None:
    wrong = hosts(apart, name, f"127.0.1.1 {name}")
    script = apart.folder / "mounts.sh"
    mount = f"mount --bind '{wrong}' /etc/hosts"
    script.write_text(f'[ $SLURM_PROCID != {on} ] || {mount}\nexec {CHECK} "$@"\n')
    said = apart.faults(f"exec unshare -m bash '{script}' \"$@\"")
    assert text in said and "/etc/hosts" in said


def test_a_link_that_is_absurdly_slow(apart: Injected) -> None:
    assert apart.cluster.door("link", "slow", "n2", "20mbit").returncode == 0
    try:
        said = apart.faults("exec CHECK")
    finally:
        assert apart.cluster.door("link", "heal").returncode == 0
    assert (
        "bandwidth: rank 0 on n1, rank 1 on n2: busbw 0.00" in said and "NCCL_SOCKET_IFNAME" in said
    )


def test_a_node_that_cannot_be_reached(apart: Injected) -> None:
    """n2's packets are lost. It gives up first, srun ends the other: and both have reported."""
    inject = "[ $SLURM_PROCID = 0 ] && exec CHECK; export MASTER_ADDR=10.77.0.99; "
    inject += f"exec {CHECK} --timeout 20"
    said = apart.faults(inject, "--timeout", "300", **apart.light)
    assert "rank 1 on n2: 10.77.0.99 cannot be reached (port " in said
    assert "presence: rank 1 on n2: did not connect" in said


def test_outside_a_step_it_says_how(cluster, injected: Injected) -> None:
    """In an allocation, but not started by srun."""
    done = subprocess.run(
        CHECK.split(),
        env={**os.environ, **injected.env, "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "`bash run.sh --preflight --dry-run`" in done.stderr
