"""The GPU check without GPUs: bounds, time limits, what is kept, what is sent; stubs of vendors."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from jobkit.checks.gpu_check import cli, expected, report, results
from jobkit.checks.gpu_check.expected import Measure
from jobkit.checks.gpu_check.parts import parts
from jobkit.checks.gpu_check.runner import Result, run_part
from jobkit.checks.gpu_check.setting import Part, Setting, told
from jobkit.processes import process_start
from support.parsers import RUN_SH, VALUED_OF_RUN_SH, of_command, parser_of
from support.place import ROOT

PYTHON = sys.executable


def part(*words: str, limit_s: int = 20, read=lambda _: [], **more) -> Part:
    """A part of one command."""
    return Part(
        name="mine", text="", limit_s=limit_s, commands=lambda _: [words], read=read, **more
    )


@pytest.fixture
def here(tmp_path: Path) -> Setting:
    return Setting(tmp_path / "check", "cuda", 2)


# Bounds


@pytest.mark.parametrize(
    ("value", "least", "most", "verdict"),
    [
        (1.0, 1.0, 2.0, "pass"),
        (0.9, 1.0, None, "FAIL"),
        (2.1, None, 2.0, "FAIL"),
        (0.0, 0, 0, "pass"),
        (1.0, 0, 0, "FAIL"),
        (7.0, None, None, "recorded"),
        (None, 1.0, 2.0, "not measured"),
        (float("nan"), 1.0, 2.0, "not measured"),
    ],
)
def test_a_number_and_its_bounds(value, least, most, verdict: str) -> None:
    assert Measure("x", value, "", least, most).verdict == verdict


@pytest.mark.parametrize(
    ("gpu", "bf16", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0, 3350),
        ("NVIDIA H100 PCIe", 756.0, 2000),
        ("NVIDIA H200", 989.0, 4800),
        ("NVIDIA GH200 120GB", 989.0, 4000),
        ("NVIDIA A100-SXM4-80GB", 312.0, 2039),
        ("NVIDIA A100-SXM4-40GB", 312.0, 1555),
        ("AMD Instinct MI300X", 1307.0, 5300),
    ],
)
def test_the_peaks_of_a_gpu_by_its_name(gpu: str, bf16: float, memory: float) -> None:
    peak = expected.peak_of(gpu)
    assert peak and (peak.bf16, peak.memory_gb_per_s) == (bf16, memory)


def test_a_product_outside_of_its_peak_fails_and_of_an_unknown_gpu_is_recorded() -> None:
    gpu = "NVIDIA A100-SXM4-80GB"
    assert expected.product("fp32", 18.0, gpu).verdict == "pass"
    assert expected.product("fp32", 90.0, gpu).verdict == "FAIL"  # it was TF32
    assert expected.product("bf16", 100.0, gpu).verdict == "FAIL"
    assert expected.product("bf16", 100.0, "NVIDIA X1").verdict == "recorded"
    assert expected.product("tf32", 100.0, "AMD Instinct MI250X").verdict == "recorded"


@pytest.mark.parametrize(
    ("link", "gb_per_s", "verdict"),
    [
        ("NV18", 300.0, "pass"),
        ("NV18", 20.0, "FAIL"),  # by way of PCIe
        ("NV4", 60.0, "pass"),
        ("SYS", 8.0, "pass"),
        ("PHB", 0.9, "FAIL"),  # by way of TCP
        ("", 8.0, "recorded"),
    ],
)
def test_the_bound_of_an_all_reduce_follows_the_link(
    link: str, gb_per_s: float, verdict: str
) -> None:
    assert expected.all_reduce(gb_per_s, "NVIDIA H100 80GB HBM3", link).verdict == verdict


# In the form that `nvidia-smi topo -m` prints, written by hand.
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\t0-55\t0
GPU1\tNV18\t X \t0-55\t0
"""


@pytest.mark.parametrize(("text", "link"), [(TOPOLOGY, "NV18"), ("GPU0\t X \t0-7\n", ""), ("", "")])
def test_the_link_between_two_gpus(tmp_path: Path, text: str, link: str) -> None:
    (tmp_path / results.GPU_LISTING).write_text(text)
    assert results.link_of(tmp_path / "comm") == link
    assert results.link_of(tmp_path / "absent" / "comm") == ""


def test_a_process_on_two_gpus_is_counted(tmp_path: Path) -> None:
    (tmp_path / results.PROCESSES).write_text("7, GPU-a\n8, GPU-b\n7, GPU-a\n")
    assert results.contexts(tmp_path).verdict == "pass"
    (tmp_path / results.PROCESSES).write_text("7, GPU-a\n8, GPU-b\n8, GPU-a\n")
    assert results.contexts(tmp_path).verdict == "FAIL"
    (tmp_path / results.PROCESSES).write_text("No running processes found\n")
    assert results.contexts(tmp_path).verdict == "not measured"


# Parts


def test_a_part_over_its_limit_is_ended_with_its_children(here: Setting, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    child = f"sleep 600 & echo $! >{mark}; wait"
    result = run_part(part("bash", "-c", child, limit_s=5), here)
    assert (result.state, "over its limit of 5 s" in result.reason) == ("FAIL", True)
    deadline = time.monotonic() + 300
    while process_start(int(mark.read_text())) is not None:
        assert time.monotonic() < deadline, "it is left"
        time.sleep(0.05)


def test_a_part_that_fails_says_why_and_is_read_all_the_same(here: Setting) -> None:
    seen = part("bash", "-c", "echo told; exit 7", read=lambda _: [Measure("x", 1.0)])
    result = run_part(seen, here)
    assert (result.state, result.reason) == ("FAIL", "exit code 7 of: bash -c echo told; exit 7")
    assert result.measures == [Measure("x", 1.0)]
    assert "told" in (here.folder / "mine" / "log.txt").read_text()


def test_results_that_cannot_be_read_and_numbers_out_of_bounds_fail(here: Setting) -> None:
    def broken(_: Path) -> list[Measure]:
        raise KeyError("busbw")

    assert "its results cannot be read" in run_part(part("true", read=broken), here).reason
    other = Setting(here.folder / "2", "cuda", 2)
    off = run_part(part("true", read=lambda _: [Measure("x", 3.0, "", 0, 1)]), other)
    assert (off.state, off.reason) == ("FAIL", "a number is outside of its bounds")
    none = run_part(part("no-such-program-here"), Setting(here.folder / "3", "cuda", 2))
    assert "exit code 127" in none.reason


def test_a_result_that_is_there_is_not_measured_again(here: Setting, tmp_path: Path) -> None:
    count = tmp_path / "count"
    again = part("bash", "-c", f"echo x >>{count}", read=lambda _: [Measure("n", 2.5, "s")])
    first, second = run_part(again, here), run_part(again, here)
    assert first == second and second.state == "pass"
    assert count.read_text() == "x\n"
    (here.folder / "mine" / "result.json").write_text('{"part": "mine"}')  # cut off
    assert run_part(again, here).state == "pass" and count.read_text() == "x\nx\n"


def test_a_part_that_needs_more_gpus_is_not_measured(here: Setting) -> None:
    result = run_part(part("false", gpus=4), here)
    assert (result.state, result.reason) == ("not measured", "needs 4 GPUs, 2 here")


# What is told and sent


def test_no_secret_of_the_environment_is_told_or_sent(here: Setting, tmp_path: Path) -> None:
    environ = {"NCCL_NET": "IB", "HF_TOKEN": "s3cr3t", "AWS_SECRET_ACCESS_KEY": "s3cr3t"}
    assert told(environ) == {"NCCL_NET": "IB"}
    run_part(part("bash", "-c", "echo fine"), here)
    own = here.folder / "mine"
    for name in ("checkpoints/1/x.json", ".submitit/a.pkl", "b.pkl", "job.sh", "launcher.json"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("s3cr3t")
    (own / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    (tmp_path / "elsewhere.txt").write_text("s3cr3t")
    archive = report.write(here, {"device": "X"}, [Result("mine", "pass")])
    with tarfile.open(archive) as tar:
        names = {name.removeprefix("check/") for name in tar.getnames()}
        whole = b"".join(tar.extractfile(member).read() for member in tar)  # type: ignore[union-attr]
        assert {(m.uid, m.uname) for m in tar} == {(0, "")}
    assert names == {"report.md", "mine/log.txt", "mine/result.json"}
    assert b"fine" in whole and b"s3cr3t" not in whole


def test_commands_get_nothing_of_a_job_or_of_another_rank(here: Setting) -> None:
    given = {"SLURM_JOB_ID": "7", "RANK": "1", "JOBKIT_FAULT": "kill@1", "HOME": "/h", "PATH": "/b"}
    found = here.environ(part("true"), given)
    assert not {"SLURM_JOB_ID", "RANK", "JOBKIT_FAULT"} & set(found) and found["HOME"] == "/h"
    assert found["NCCL_DEBUG_FILE"].startswith(str(here.folder / "mine"))


def test_the_report_names_every_number_with_its_bounds_and_reason(here: Setting) -> None:
    measures = [Measure("busbw | all", 3.0, "GB/s", 5.0, None, "a link")]
    text = report.text_of(here, {"device": "X"}, [Result("comm", "FAIL", "off", 3.2, 60, measures)])
    assert "| comm | FAIL | 3 s of 60 s | off |" in text
    assert "| busbw / all | 3 | GB/s | at least 5 | FAIL | a link |" in text
    small = report.text_of(Setting(here.folder, "cpu", 0), {}, [])
    assert small.startswith("# rehearsal on the CPU: no number is of a GPU")


# The command


def test_without_a_gpu_it_is_one_line_and_2(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}
    words = [PYTHON, "-m", "jobkit", "gpu-check", "--folder", str(tmp_path / "x")]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no GPU is visible here" in done.stderr and "--device cpu" in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_part_that_fails_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    stubs = [replace(part("false"), name="one"), replace(part("true"), name="two")]
    monkeypatch.setattr(cli, "parts", lambda: stubs)
    monkeypatch.setattr(cli, "count_gpus", lambda: 2)
    code = cli.main(["--folder", str(tmp_path / "check")])
    out = capsys.readouterr().out
    assert code == 4 and "1/2 one" in out and "2/2 two" in out
    assert out.rstrip().endswith(f"send back: {tmp_path / 'check.tar.gz'}")
    kept = json.loads((tmp_path / "check" / "two" / "result.json").read_text())
    assert kept["state"] == "pass"


def check_words(words: list[str]) -> None:
    """Each command of a part is taken by the program that it starts."""
    if words[0] == "env":
        assert words[1] == "TORCH_DISTRIBUTED_PIPELINE_PER_DIRECTION_P2P=1"
        words = words[2:]
    if words[0] == "bash":
        assert words[1] == str(ROOT / "run.sh")
        rest = words[2:]
        own = {w for w in rest if w in VALUED_OF_RUN_SH}
        for option in own:
            at = rest.index(option)
            del rest[at : at + 2]
        parser_of(*RUN_SH).parse_args(rest)
    elif words[1:3] == ["-m", "jobkit"]:
        of_command(words[3]).parse_args(words[4:])
    elif words[1] == "-m" and "jobkit.checks.preflight.cli" in words:
        at = words.index("jobkit.checks.preflight.cli")
        of_command("preflight").parse_args(words[at + 1 :])
    elif words[1].endswith(".py"):
        source = Path(words[1]).read_text()
        assert [w for w in words if w.startswith("--") and f'"{w}"' not in source] == []
    else:
        assert "pytest" in words or "jobkit.checks.gpu_check.step" in words, words


@pytest.mark.parametrize("setting", [("cuda", 1), ("cuda", 2), ("cpu", 0)])
def test_the_commands_of_all_parts_are_taken(tmp_path: Path, setting: tuple[str, int]) -> None:
    where = Setting(tmp_path, *setting)
    commands = [words for one in parts() for words in one.commands(where)]
    assert len(commands) > 10
    for words in commands:
        check_words(list(words))
    assert sum(one.limit_s for one in parts()) <= 1800


def test_the_parts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        one.name for one in parts()
    ]
    assert cli.main(["--parts", "stepp"]) == 2
    assert "did you mean 'step'" in capsys.readouterr().err


@pytest.mark.parametrize(("ranks", "expected"), [(1, []), (2, ["pp", "pp-per-direction"])])
def test_pipelines_are_measured_with_both_kinds_of_communicators(
    tmp_path: Path, ranks: int, expected: list[str]
) -> None:
    (train,) = (one for one in parts() if one.name == "train")
    found = [list(words) for words in train.commands(Setting(tmp_path, "cuda", ranks))]
    pipelines = [words for words in found if "pp" in words]
    assert [Path(words[words.index("--run-dir") + 1]).name for words in pipelines] == expected
    assert [words[0] for words in pipelines] == ["bash", "env"][: len(expected)]
