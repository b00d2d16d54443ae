"""Counters of energy and load, on made-up trees of /sys and /proc, and a made-up NVML."""

from operator import setitem
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobkit.program import machine
from jobkit.program.lines import Writer
from jobkit.program.process import local_rank
from support.records import records_of
from support.warm_programs import run

PM = "sys/cray/pm_counters/energy"


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def nvml(mig: int = 0, counts: bool = True) -> SimpleNamespace:
    """NVML with one GPU: 40 % busy, 2 GiB in use, 5 J. Its functions write into their arguments."""
    return SimpleNamespace(
        nvmlDeviceGetHandleByUUID=lambda name, handle: 0 if name == b"GPU-1" else 6,
        nvmlDeviceGetMigMode=lambda _, now, pending: setattr(now._obj, "value", mig) or 0,
        nvmlDeviceGetUtilizationRates=lambda _, rates: setitem(rates._obj, 0, 40) or 0,
        nvmlDeviceGetMemoryInfo=lambda _, memory: setitem(memory._obj, 2, 2 << 30) or 0,
        nvmlDeviceGetTotalEnergyConsumption=lambda _, joules: (
            setattr(joules._obj, "value", 5000) or (0 if counts else 3)
        ),
    )


def test_the_energy_of_a_cray_node(tmp_path: Path) -> None:
    assert machine.node_joules(tmp_path) is None
    for text, joules in (("none", None), ("12 kJ 3 us\n", None), ("1234 J 99 us\n", 1234.0)):
        put(tmp_path, PM, text)
        assert machine.node_joules(tmp_path) == joules


def test_nvml_reports_a_gpu_and_nothing_of_a_part_of_one() -> None:
    whole = {"busy": 0.4, "memory_mib": 2048.0, "joules": 5.0}
    assert machine.nvidia_gpu(nvml(), "1").read() == whole
    del whole["joules"]
    assert machine.nvidia_gpu(nvml(counts=False), "1").read() == whole
    for nothing in (machine.nvidia_gpu(nvml(mig=1), "1"), machine.nvidia_gpu(nvml(), "2")):
        assert nothing == machine.Gpu() and nothing.read() == {}


def test_amds_driver_reports_load_and_memory(tmp_path: Path) -> None:
    put(tmp_path, "gpu_busy_percent", "73\n")
    put(tmp_path, "mem_info_vram_used", str(3 << 20))
    assert machine.amd_gpu(tmp_path).read() == {"busy": 0.73, "memory_mib": 3.0}


OWN = "A=1\0JOBKIT_RUN_DIR=/logs/s/ddp-n1-g2-r0\0"


def process(root: Path, pid: int, environ: str, ticks: int) -> None:
    put(root, f"proc/{pid}/environ", environ)
    put(root, f"proc/{pid}/cmdline", "python")
    words = ["S", *["0"] * 10, str(ticks), "5", *["0"] * 8]
    put(root, f"proc/{pid}/stat", f"{pid} (a (b) c) {' '.join(words)}")


def test_load_and_memory_of_a_node_and_what_of_it_is_others(tmp_path: Path) -> None:
    """Of 1,000 ticks 400 are idle, 100 stolen and 200 the run's."""
    load, unnamed = machine.Load(tmp_path, "ddp-n1-g2-r0"), machine.Load(tmp_path, "")
    assert load.shares() == (None, None) and machine.memory_mib(tmp_path) is None  # no such files
    put(tmp_path, "proc/stat", "cpu 100 0 100 790 10 0 0 0 0 0\ncpu0 1\n")
    process(tmp_path, 7, OWN, 50)
    process(tmp_path, 8, "A=1\0", 50)
    assert load.shares() == unnamed.shares() == (None, None)  # nothing to compare with
    put(tmp_path, "proc/stat", "cpu 500 0 200 1100 100 0 0 100 0 0\ncpu0 1\n")
    process(tmp_path, 7, OWN, 200)
    process(tmp_path, 8, "A=1\0", 450)
    process(tmp_path, 9, OWN, 45)  # which came since
    assert load.shares() == (pytest.approx(0.6), pytest.approx(0.4))
    assert unnamed.shares() == (pytest.approx(0.6), None)  # of a folder such as "."
    put(tmp_path, "proc/meminfo", "MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\n")
    assert machine.memory_mib(tmp_path) == 3.0


@pytest.mark.parametrize(("alone", "source"), [("1", "pm_counters (node)"), ("", None)])
def test_a_nodes_energy_is_sampled_where_the_job_has_it_alone(tmp_path, alone, source) -> None:
    """Of two samples, 30 J apart."""
    put(tmp_path, PM, "1000 J 0 us\n")
    path = tmp_path / "0.s0.jsonl"
    writer = Writer(study="s", run_id="r", attempt=0, rank=0, path=path, log=None)
    sampler = machine.Sampler(writer, [], True, {"JOBKIT_NODE_ALONE": alone}, tmp_path)
    writer.write("sample", **sampler.sample())
    put(tmp_path, PM, "1030 J 0 us\n")
    sampler.start()
    sampler.stop()
    first, *_, last = records_of(path)
    joules = (0.0, 30.0) if alone else (None, None)
    assert (first.get("energy_node_j"), last.get("energy_node_j")) == joules
    assert first["energy_source"] == last["energy_source"] == source


def test_a_sample_names_the_gpus_whose_energy_it_counts(tmp_path: Path) -> None:
    def sampled(*gpus: machine.Gpu) -> dict:
        writer = Writer(study="s", run_id="r", attempt=0, rank=1, path=None, log=None)
        return machine.Sampler(writer, gpus, False, {}, tmp_path).sample()

    gpu, other = machine.Gpu("GPU-1", lambda: {"joules": 3.0, "busy": 0.5}), machine.Gpu("GPU-2")
    named = [sampled(*gpus)["gpu_uuids"] for gpus in ([gpu], [gpu, other], [other, gpu], [other])]
    assert named[1] == named[2] and len(set(named)) == 3 and None not in named
    assert sampled(gpu, machine.Gpu())["gpu_uuids"] is sampled()["gpu_uuids"] is None
    found = sampled(gpu, gpu)
    assert (found["energy_gpu_j"], found["energy_source"]) == (0.0, "nvml (gpu)")
    found = sampled(gpu, other)  # of one the energy is not known
    assert "energy_gpu_j" not in found and found["energy_source"] is None
    assert found["gpu_busy"] == 0.5


def test_samples_get_rarer_and_never_stop() -> None:
    assert [machine.interval_s(s) for s in (0, 300, 3000, 1e9)] == [1.0, 1.0, 10.0, 60.0]


def test_the_rank_within_a_node() -> None:
    for env, rank in (({"LOCAL_RANK": "0"}, 0), ({"SLURM_LOCALID": "1"}, 1), ({}, 4)):
        assert local_rank(env, 4) == rank


def test_the_last_sample_comes_after_the_last_window(tmp_path: Path) -> None:
    """Without end(), too: energy is that between the ends of windows which samples enclose."""
    program = "from jobkit import meter; meter.start(); meter.step(1); meter.step(1)"
    ran = run(tmp_path, program, JOBKIT_AUTO="0", JOBKIT_WARMUP_STEPS="1")
    window, samples = ran.records("window")[-1], records_of(ran.metrics / "0.s0.jsonl")
    assert window["step"] == 2
    assert samples[-1]["t"] >= window["t"]
