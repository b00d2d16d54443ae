"""hpc/gpu-check.sh with a stub of Python: which parts run, when it ends, and what is sent back."""

import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from support.place import ROOT, script
from support.rigs import environment

# Each part's command ends as a file in $STUB says, and prints what it was given. bash stands for
# run.sh: of its two runs the first one is stopped.
STUB = """#!/bin/bash
printf '%s\\n' "$*" >>"$STUB/calls"
case "$*" in
  "-m jobkit.gpus") cat "$STUB/gpus" ;;
  *preflight.cli*) [[ -z ${TORCHLESS-} ]] || { echo "no module torch"; exit 1; }
    cat "$STUB/preflight"; grep -q FAULT "$STUB/preflight" && exit 5; exit 0 ;;
  *"checks.gpu "*) echo "MISSED memory predicted / measured: 0.5"; exit 4 ;;
  *"jobkit verify"*) echo "all are within it; token ${SLURM_JOB_ID-none}" ;;
  *"spec_from"* | *find_spec*) exit 0 ;;
  *payload.main*--check*) exit 0 ;;
  *) exit 7 ;;
esac
"""


@pytest.fixture
def check(tmp_path: Path):
    """Run the script: check(words, gpus=..., preflight=...) -> (code, output, folder)."""
    stub = tmp_path / "stub"
    stub.mkdir()
    script(stub / "python", STUB)
    script(stub / "nvidia-smi", "#!/bin/sh\necho topology of GPUs\n")
    script(stub / "srun", '#!/bin/sh\ncat "$STUB/preflight"\n')

    def run(*words: str, gpus: int = 2, preflight: str = "note cores: 2", **more: str):
        (stub / "gpus").write_text(f"{gpus}\n")
        (stub / "preflight").write_text(f"[preflight] ok environment: a\n[preflight] {preflight}\n")
        given = environment(
            STUB=str(stub), JOBKIT_PYTHON=str(stub / "python"), MY_TOKEN="s3cr3t", **more
        )
        given["PATH"] = f"{stub}:{given['PATH']}"
        folder = tmp_path / "check"
        line = ["bash", str(ROOT / "hpc" / "gpu-check.sh"), "--folder", str(folder), *words]
        done = subprocess.run(line, env=given, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr, folder

    return run


def test_a_part_that_fails_stops_no_other_and_the_logs_are_packed(check) -> None:
    code, out, folder = check("--parts", "epoch verify")
    assert code == 4 and out.index("FAILED epoch: exit code 4") < out.index("ok     verify: ")
    assert "MISSED memory predicted / measured: 0.5" in out and "note cores: 2" in out
    assert "1 failed: epoch\n" in out and out.endswith(f"send back: {folder}.tar.gz\n")
    ranks = "run --standalone --nproc-per-node=2 -m jobkit.checks.gpu --device cuda"
    assert ranks in (folder.parent / "stub" / "calls").read_text()
    (folder / "stop" / "checkpoints").mkdir(parents=True)
    for name in ("stop/checkpoints/0.distcp", "stop/job.sh", "stop/a.pkl"):
        (folder / name).write_text("s3cr3t")
    # A part of one node does not see the allocation.
    assert "ok     verify" in check("--parts", "verify", SLURM_JOB_ID="7")[1]
    assert "token none" in (folder / "verify.log").read_text()
    with tarfile.open(f"{folder}.tar.gz") as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}  # type: ignore[union-attr]
    assert {Path(name).name for name in files} >= {"preflight.log", "verify.log", "topology.txt"}
    assert not [name for name, content in files.items() if b"s3cr3t" in content]


def test_what_is_asked_of_gpus_here_and_of_two_ranks(check) -> None:
    for words, more, code, said in (
        ("recipe", {}, 4, "2 failed: recipe energy\n"),  # without a counter of energy
        ("recipe --device cpu", {}, 4, "1 failed: recipe\n"),
        ("comm", {"gpus": 1}, 0, "no comm: it needs two ranks"),
        ("comm", {"gpus": 1, "SLURM_NNODES": "2"}, 4, "1 failed: comm"),
    ):
        found, out, _ = check("--parts", *words.split(), **more)
        assert found == code and said in out


def test_an_environment_that_cannot_work_ends_it_at_once(check) -> None:
    code, out, _ = check(preflight="FAULT gpus: too old; fix: install a torch")
    assert code == 2 and "fix: install a torch" in out and "verify" not in out
    assert "nothing else can run until this is fixed" in out and "send back" in out
    code, out, _ = check(TORCHLESS="1")
    assert code == 2 and "no module torch" in out and "make venv" in out and "verify" not in out


def test_limits_grow_with_the_first_start(check) -> None:
    """SECONDS is bash's clock: as if the first start had taken 25 s, and not 5."""
    assert "(limit 150 s)" in check("--parts", "epoch")[1]
    assert re.search(r"\(limit [789]\d\d s\)", check("--parts", "epoch", SECONDS="25")[1])


def test_refusals(check) -> None:
    for words, gpus, text in (
        ((), 0, "no GPU is visible here"),
        (("--device", "tpu"), 2, "--device tpu: must be cuda or cpu"),
        (("--part", "x"), 2, "--part is no option"),
        (("--parts",), 2, "--parts needs a value"),
    ):
        code, out, folder = check(*words, gpus=gpus)
        assert code == 2 and text in out and not Path(f"{folder}.tar.gz").exists()
