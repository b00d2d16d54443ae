"""The parts of a GPU check: the commands of each, on GPUs and, smaller, in a rehearsal."""

import sys
from collections.abc import Sequence

from jobkit.checks.gpu_check import results
from jobkit.checks.gpu_check.setting import Part, Setting
from jobkit.paths import REPOSITORY

_Words = list[str]
# A communicator for each direction of a pipeline, instead of one for both (torch, since 2.14).
_VARIABLES = {"pp-per-direction": ["env", "TORCH_DISTRIBUTED_PIPELINE_PER_DIRECTION_P2P=1"]}


def _jobkit(*words: str) -> _Words:
    return [sys.executable, "-m", "jobkit", *words]


def _ranks(setting: Setting, module: str, *words: str) -> _Words:
    """Start a module as one process for each GPU of this machine."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launch, f"--nproc-per-node={setting.ranks}", "-m", module, *words]


def _step(setting: Setting) -> list[_Words]:
    out = str(setting.folder / "step" / "step.json")
    module = "jobkit.checks.gpu_check.step"
    return [_ranks(setting, module, out, "--device", setting.device)]


def _preflight(setting: Setting) -> list[_Words]:
    words = ["--json", "--dataset", "synthetic", "--device", setting.device]
    words += ["--run-dir", str(setting.folder / "preflight" / "logs")]
    return [_ranks(setting, "jobkit.checks.preflight.cli", *words)]


def _tests(setting: Setting) -> list[_Words]:
    words = [sys.executable, "-m", "pytest", str(REPOSITORY / "tests" / "payload"), "-q"]
    words += ["-m", "on_device", "-p", "no:cacheprovider"]
    words += [f"--junitxml={setting.folder / 'tests' / 'junit.xml'}"]
    return [[*words, "-k", "test_a_batch_a_rank"] if setting.rehearsal else words]


def _verify(setting: Setting) -> list[_Words]:
    small = ["--strategies", "ddp", "--world-sizes", "1"]
    return [_jobkit("verify", "--json", *(small if setting.rehearsal else ["--world-sizes", "2"]))]


def _comm(setting: Setting) -> list[_Words]:
    words = ["--nproc-per-node", str(setting.ranks), "--iterations", "5"]
    words += ["--backend", "gloo" if setting.rehearsal else "nccl"]
    words += ["--run-dir", str(setting.folder / "comm" / "run")]
    small = ["--ops", "all_reduce", "--max-bytes", "16K", "--seconds-per-size", "0.02"]
    big = ["--max-bytes", "256M", "--seconds-per-size", "0.3"]
    return [_jobkit("comm", *words, *(small if setting.rehearsal else big))]


def _train(setting: Setting) -> list[_Words]:
    """Return training runs: each arithmetic, sharded, pipelined, and twice the same."""
    runs = {
        "ddp-ieee": ["--strategy", "ddp", "--fp32", "ieee"],
        "ddp-tf32": ["--strategy", "ddp", "--fp32", "tf32"],
        "ddp-bf16": ["--strategy", "ddp", "--precision", "bf16", "--checkpoint-every", "epoch"],
        "fsdp-ieee": ["--strategy", "fsdp", "--fp32", "ieee"],
        "pp": ["--strategy", "pp"],
        "pp-per-direction": ["--strategy", "pp"],
        "same-bits-1": ["--strategy", "fsdp", "--deterministic"],
        "same-bits-2": ["--strategy", "fsdp", "--deterministic"],
    }
    words = ["--model", "resnet18", "--epochs", "2", "--train-samples", "20000"]
    if setting.rehearsal:
        runs = {name: runs[name] for name in runs if name.startswith("same-bits")}
        words = ["--model", "mlp", "--epochs", "1", "--train-samples", "128"]
        words += ["--test-samples", "16", "--global-batch-size", "32"]
        words += ["--breakdown-iterations", "0"]
    script = ["bash", str(REPOSITORY / "run.sh"), "--nproc-per-node", str(setting.ranks)]
    script += ["--dataset", "synthetic", "--device", setting.device]
    folder = setting.folder / "train"
    return [
        [*_VARIABLES.get(name, ()), *script, "--run-dir", str(folder / name), *more, *words]
        for name, more in runs.items()
        if setting.ranks > 1 or not name.startswith("pp")
    ]


def _study(setting: Setting) -> list[_Words]:
    sizes = ["1", "2"] if setting.ranks > 1 else ["1"]
    words = ["--study", "demo", "--name", "gpu-check", "--site", "local", "--gpus", *sizes]
    words += ["--device", setting.device]
    if setting.rehearsal:
        words += ["--strategies", "ddp", "--epochs", "1", "--train-samples", "256"]
        words += ["--test-samples", "16", "--model", "mlp"]
    return [_jobkit("run", *words), _jobkit("collect", "gpu-check"), _jobkit("plot", "gpu-check")]


def _drill(setting: Setting) -> list[_Words]:
    faults = ["kill"] if setting.rehearsal else ["kill", "warning"]
    return [_jobkit("drill", "--local", "--device", setting.device, "--faults", *faults)]


def _bench(setting: Setting) -> list[_Words]:
    bench = REPOSITORY / "tests" / "bench"
    out = str(setting.folder / "bench" / "strategies.json")
    python = sys.executable
    return [
        [python, str(bench / "strategies.py"), "--rounds", "2", "--runs", "1", "--output", out],
        [python, str(bench / "checkpoints.py"), "--rounds", "1"],
    ]


def parts() -> Sequence[Part]:
    """Return all parts in the order in which they run: what others are compared with comes first.

    The limits are of GPUs; a rehearsal keeps them.
    """
    return (
        Part(
            name="step",
            text="training steps that never wait for the GPU; speed of products and copies",
            limit_s=150, commands=_step, read=results.step,
        ),
        Part(
            name="preflight", text="the preflight, one rank per GPU", limit_s=90,
            commands=_preflight, read=results.preflight,
        ),
        Part(
            name="comm", text="collectives between the GPUs", limit_s=120, gpus=2,
            commands=_comm, read=results.comm,
        ),
        Part(
            name="train", text="ResNet-18 in each arithmetic, and the same bits twice",
            limit_s=300, watched=True, commands=_train, read=results.train,
        ),
        Part(
            name="study", text="the demo study, collected and plotted", limit_s=240,
            commands=_study, read=results.study,
        ),
        Part(
            name="drill", text="a killed and a warned run resume with the same bits", limit_s=240,
            gpus=2, commands=_drill, read=results.drill,
        ),
        Part(
            name="verify", text="each strategy against one process, on the CPU beside GPUs",
            limit_s=180, commands=_verify, read=results.verify,
        ),
        Part(
            name="tests", text="the tests that run on any device (pytest -m on_device)",
            limit_s=240, commands=_tests, read=results.tests,
        ),
        Part(
            name="bench", text="strategies against single, cost of checkpoints: see its log",
            limit_s=240, gpus=2, commands=_bench, rehearsed=False,
        ),
    )  # fmt: skip
