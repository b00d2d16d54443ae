"""The check of EDFs: each mistake is found at its key, and no text stops the check."""

import contextlib
import tomllib
from pathlib import Path

import pytest

from jobkit.errors import Exit
from jobkit.launch.check_files import check_edf
from jobkit.launch.check_files import edf_main as main
from support.place import ROOT

IMAGE = 'image = "a:1"\n'
NOTES = IMAGE + "[annotations]\n"
ENV = IMAGE + '[env]\nA = "x"\n'
NCCL = "com.hooks.aws_ofi_nccl.enabled"
VARIANT = "com.hooks.aws_ofi_nccl.variant"
REMAP = "com.pyxis.pytorch_remap_vars"
CXI = "com.hooks.cxi.enabled"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("s", "t"):
        (tmp_path / name).mkdir()
    (tmp_path / "f.sqsh").touch()
    return tmp_path


def found(text: str, folder: Path, here: bool = True, **more: str) -> list[tuple[str, str, str]]:
    with contextlib.chdir(folder):
        return check_edf(text, {"SCRATCH": str(folder), **more}, here)


# Text; key and message of its only error.
ERRORS = [
    (IMAGE + 'mount = ["/s:/s"]', "mount", "unknown key; did you mean 'mounts'?"),
    (IMAGE + "entrypoint = 0", "entrypoint", "must be true or false (without quotes)"),
    ('image = ["a:1"]', "image", "must be a string"),
    (IMAGE + "env = []", "env", "must be a table"),
    (IMAGE + 'mounts = [["./s:/s"]]', "mounts[0]", "must be a string, within quotes"),
    (IMAGE + 'env.A = ["a"]', "env.A", "must be a string, within quotes"),
    (f'image = "/{"x" * 300}"', "image", "x does not exist"),  # its look-up is an OSError
    ('image = "${SCRATCH}/none.sqsh"', "image", "/none.sqsh does not exist"),
    (IMAGE + 'mounts = ["./s:/s", "/no:/d"]', "mounts[1]", "/no does not exist"),
    (IMAGE + 'mounts = ["${SCRACH}:/s"]', "mounts[0]", "not defined: export it, or write ${SC"),
    (IMAGE + 'workdir = "$HOME/x"', "workdir", "'$HOME' is not expanded: write ${HOME}"),
    (ENV + 'mounts = ["./s:/s"]', "env.mounts", "is read as part of [env]"),
    (ENV + 'PYTHONPATH = "/mine"', "env.PYTHONPATH", "hides run.sh's"),
    (NOTES + f"{CXI} = true", f"annotations.{CXI}", "must be a string, within quotes"),
    (NOTES + 'com.hooks.cxi.enable = "true"', "annotations.com.hooks.cxi.enable", f"mean '{CXI}'"),
    (NOTES + f'{NCCL} = "true"\n{CXI} = "false"', f"annotations.{NCCL}", f'needs {CXI} = "true"'),
    (NOTES + f'{CXI} = "true"\n{VARIANT} = "cuda13"', f"annotations.{VARIANT}", "NCCL uses TCP"),
    (NOTES + f'{REMAP} = "true"', f"annotations.{REMAP}", "sets RANK and LOCAL_RANK"),
    (IMAGE + "workdir = /tmp", "", "not valid TOML: "),
]
WARNINGS = [
    ('image = ""', "image", "missing, so that no container is used"),
    ('workdir = "/w"', "image", "missing, so that no container is used"),
    (IMAGE + 'workdir = "/a/${SLURM_JOB_ID}"', "workdir", "${SLURM_JOB_ID} is not defined"),
    (NOTES + f'{NCCL} = "true"', f"annotations.{NCCL}", f'needs {CXI} = "true"'),
    (NOTES + f'{NCCL} = "false"\n{VARIANT} = "cuda13"', f"annotations.{VARIANT}", "has no effect"),
]  # fmt: skip
MISTAKES = [("error", *case) for case in ERRORS] + [("warning", *case) for case in WARNINGS]


@pytest.mark.parametrize(("severity", "text", "key", "message"), MISTAKES)
def test_a_mistake_is_found_at_its_key(severity, text, key, message, folder) -> None:
    [(as_, at, words)] = found(text, folder)
    assert (as_, at) == (severity, key)
    assert message in words


GOOD = """\
image = "${SCRATCH}/f.sqsh"
mounts = ["${SCRATCH}:${SCRATCH}", './t:/t:ro+private', "./f.sqsh:/data:sqsh", "${NONE:-/}:/root"]
workdir = "/w/${NONE:-}"
entrypoint = true
env = { A = "", PATH = "${SCRATCH}/bin:$${PATH}", PYTHONPATH = "/m:${PYTHONPATH:-}" }

[annotations]
com.hooks.ssh = { enabled = "true", authorize_ssh_key = "/home/me/id.pub", port = "1" }
com.hooks.cxi.enabled = "true"
"com.hooks.aws_ofi_nccl.variant" = "cuda-dl"
com.hooks.aws_ofi_nccl.enabled = "true"
com.sarus.perfmon = "true"
"""


def test_what_is_allowed_is_not_found(folder: Path) -> None:
    assert found(GOOD, folder) == []
    text = (ROOT / "edf.toml").read_text()  # which has all that a user may want to change
    assert {"image", "mounts", "workdir", "env", "annotations"} <= set(tomllib.loads(text))
    assert found(text, folder, PWD="/home/me/jobkit") == []
    assert [key for _, key, _ in found(text, folder)] == ["workdir"]  # PWD
    # On another machine paths are not checked.
    text = 'image = "/no.sqsh"\nmounts = ["/no:/a", "${NONE}:/b"]\n'
    [(severity, key, _)] = found(text, folder, here=False)
    assert (severity, key) == ("warning", "mounts[1]")


def test_command_with_findings(folder, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    (folder / "w.toml").write_text("writable = true\n")
    (folder / "e.toml").write_text('image = "./a\\n\\u001bb"\n')
    assert main(["w.toml"]) == Exit.OK  # a warning is no error
    capsys.readouterr()
    assert main(["w.toml", "e.toml", "none.toml", "."]) == Exit.USAGE
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in said[:-1]] == [
        ["w.toml", "warning"], ["e.toml", "error"], ["none.toml", "error"], [".", "error"],
    ]  # fmt: skip
    assert "./a b does not exist" in said[1]  # no control character reaches the terminal
    assert said[-1] == "files: 4, errors: 3, warnings: 1"
