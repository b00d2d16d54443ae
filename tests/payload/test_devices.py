"""Which device each rank takes, decided by all ranks together. The GPUs are fakes."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from jobkit.errors import UsageError
from jobkit.payload.devices import Agreed, Candidate, agree_device, agreed, candidate
from jobkit.payload.place import RankEnv
from support.fake_cuda import SITE, FakeCuda
from support.rigs import NO_BREAKDOWN, ROOT, Start, environment


def gpu(uuid: str, host: str = "n1", visible: int = 1, **more: str) -> Candidate:
    return Candidate(host, f"machine {host}", visible, uuid=uuid, **more)


NONE = Candidate("n2", "machine n2")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_two_ranks_on_one_gpu_are_named(wanted: str) -> None:
    found = [gpu("GPU-a"), gpu("GPU-b"), gpu("GPU-b", "n2"), gpu("GPU-c", "n2")]
    with pytest.raises(UsageError, match=r"^rank 1 on n1, rank 2 on n2 would share one GPU .GPU-b"):
        agreed(found, wanted, on_slurm=True)


def test_off_slurm_auto_takes_the_cpu_where_gpus_are_too_few() -> None:
    found = [gpu("GPU-a"), gpu("GPU-a")]
    verdict = agreed(found, "auto", on_slurm=False)
    assert verdict == Agreed("cpu", "1 GPU for 2 ranks: all ranks compute on the CPU")
    with pytest.raises(UsageError, match="would share one GPU"):
        agreed(found, "cuda", on_slurm=False)


def test_each_rank_its_own_gpu_however_many_it_sees() -> None:
    """All of a node's, its own only, or two of four as --gpu-bind=closest shows them."""
    for visible in (1, 2, 4):
        found = [gpu(f"GPU-{i}", visible=visible) for i in range(4)]
        assert agreed(found, "auto", on_slurm=True) == Agreed("cuda")
    instances = [gpu(f"MIG-{i}", bus="0:1:0") for i in range(2)]
    assert agreed(instances, "auto", on_slurm=True) == Agreed("cuda")


def test_without_uuids_the_address_on_the_machine_decides() -> None:
    same = [gpu("", bus="0:1:0"), gpu("", bus="0:1:0")]
    with pytest.raises(UsageError, match=r"rank 0 on n1, rank 1 on n1 would share one GPU .0:1:0"):
        agreed(same, "auto", on_slurm=True)
    assert agreed([same[0], gpu("", "n2", bus="0:1:0")], "auto", on_slurm=True) == Agreed("cuda")


def test_ranks_that_see_no_gpu_are_named_where_others_see_one() -> None:
    with pytest.raises(UsageError, match=r"^rank 1 on n2: no GPU is visible there, and the other"):
        agreed([gpu("GPU-a"), NONE], "auto", on_slurm=True)
    assert agreed([NONE, NONE], "auto", on_slurm=True) == Agreed("cpu")
    with pytest.raises(UsageError, match="--device cuda: no GPU is visible here"):
        agreed([NONE, NONE], "cuda", on_slurm=True)


def test_a_defective_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, "broken")
    found = [gpu("GPU-a"), candidate("auto", RankEnv())]
    with pytest.raises(UsageError, match=r"rank 1 on .*uncorrectable ECC error encountered.;"):
        agreed(found, "auto", on_slurm=True)


def test_sharing_that_the_user_asks_nccl_for_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert agreed([gpu("GPU-a"), gpu("GPU-a")], "auto", on_slurm=True) == Agreed("cuda")


def test_the_gpu_is_the_local_ranks_of_those_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, "GPU-a", "GPU-b")
    assert candidate("auto", RankEnv(local_rank=3, world_size=4, local_world_size=4)).index == 1
    assert candidate("cpu", RankEnv()).visible == 0
    device = agree_device("auto", RankEnv(), None, pytest.fail)
    assert device == torch.device("cuda", 0) and cuda.chosen == [device]


def _all_ranks(world: int, wanted: str) -> list[object]:
    """What each rank, as a thread, concludes at one store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: list[object] = [None] * world

    def work(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        place = RankEnv(rank=rank, local_rank=rank, world_size=world, local_world_size=world)
        try:
            found[rank] = agree_device(wanted, place, client, lambda _: None)
        except UsageError as error:
            found[rank] = str(error)

    ranks = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(300)
    return found


def test_all_ranks_get_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, "GPU-a", "GPU-b")
    assert _all_ranks(2, "auto") == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert _all_ranks(3, "auto") == [torch.device("cpu")] * 3
    texts = _all_ranks(3, "cuda")
    assert len(set(texts)) == 1 and "rank 0 on" in str(texts[0]) and "rank 2 on" in str(texts[0])


def test_a_workstation_with_one_gpu_runs_two_ranks_on_the_cpu(
    launch: Start, tmp_path: Path
) -> None:
    """As `make demo` does there. The fake GPU is in the Python of the ranks."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    words = ("--nproc-per-node", "2", "--dataset", "synthetic", "--train-samples", "64")
    done = launch(
        *(*words, "--test-samples", "8", "--epochs", "1", *NO_BREAKDOWN),
        PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}",
        FAKE_GPUS="GPU-a",
    )
    assert done.codes == [0], done.out
    assert "warning: 1 GPU for 2 ranks: all ranks compute on the CPU" in done.out
    assert done.record("run_start")["device_type"] == "cpu"


@pytest.mark.parametrize("module", ["jobkit.payload.main", "jobkit.checks.preflight.cli"])
@pytest.mark.parametrize(("device", "seen"), [("cpu", ["", "-1"]), ("auto", ["0,1", "None"])])
def test_a_run_on_the_cpu_hides_the_gpus_before_torch_is_imported(
    tmp_path: Path, module: str, device: str, seen: list[str]
) -> None:
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    said = "".join(
        f"print('SEEN', {name!r}, os.environ.get({name!r}), flush=True)\n" for name in names
    )
    (tmp_path / "torch.py").write_text(f"import os\n{said}os._exit(7)")
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}", CUDA_VISIBLE_DEVICES="0,1")
    env.pop("HIP_VISIBLE_DEVICES", None)
    words = [sys.executable, "-u", "-m", module, "--device", device]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.startswith("SEEN")]
    wanted = zip(names, seen, strict=True)
    assert lines == [f"SEEN {name} {value}".rstrip() for name, value in wanted]
