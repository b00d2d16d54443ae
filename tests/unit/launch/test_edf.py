"""The check of EDFs: each mistake is found on its line, with its own words."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from jobkit.errors import Exit
from jobkit.launch.edf.check import DEEPEST, LONGEST, check
from jobkit.launch.edf.cli import main
from support.place import ROOT

DATA = Path(__file__).parent / "data" / "edf"
BROKEN = sorted((DATA / "broken").glob("*.toml"))
EXPECTED = re.compile(r"  #: (error|warning): (.*)$")  # in the files: what is found on this line
WHOLE_PATH = "write the whole path, or ${PWD} for where srun is called"
IMAGE = 'image = "a:1"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where srun is called: with two folders to mount, two files, and base environments."""
    for name in ("s", "t"):
        (tmp_path / name).mkdir()
    for name in ("f.sqsh", "id.pub"):
        (tmp_path / name).touch()
    shutil.copytree(DATA / "envs", tmp_path / "envs")
    return tmp_path


def environ(folder: Path) -> dict[str, str]:
    return {"SCRATCH": str(folder), "HOME": "/nowhere", "EDF_PATH": str(folder / "envs")}


def found(text: str, folder: Path, here: bool = True, **more: str) -> list[tuple[int, str, str]]:
    findings = check(text, folder, {**environ(folder), **more}, here)
    return [(f.line, f.severity, f.message.replace(str(folder), "FOLDER")) for f in findings]


def messages(text: str, folder: Path, **more: str) -> list[str]:
    return [message for _, _, message in found(text, folder, **more)]


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_mistake_is_found_on_its_line(path: Path, folder: Path) -> None:
    text = path.read_text()
    expected = [
        (number, *match.groups())
        for number, line in enumerate(text.splitlines(), 1)
        if (match := EXPECTED.search(line))
    ]
    assert expected, "the file says not what is wrong in it"
    assert found(text, folder) == expected


def test_broken_files_are_many_and_differ() -> None:
    lines = [line for path in BROKEN for line in path.read_text().splitlines()]
    said = {match[2] for line in lines if (match := EXPECTED.search(line))}
    assert len(BROKEN) >= 70
    assert len(said) >= 70


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('image = "a:1"\nworkdir = /tmp\n', 2, "Invalid value; a string stands within quotes"),
        ("writable = True\n", 1, "Invalid value; a string stands within quotes"),
        ('image = "a:1"\nimage = "b:1"\n\n', 2, "Cannot overwrite a value; a key or table is"),
        ('image = "a:1"\n[env]\nA = "1"\n[env]\n', 4, "Cannot declare ('env',) twice; a key"),
        ('mounts = [\n"/s:/s"\nwritable = true\n', 3, "Unclosed array; an array ends with"),
        ('workdir = "/w\nwritable = true\n', 1, "Illegal character '\\n'; a string ends"),
        ("\nimage: a\n", 2, "Expected '=' after a key in a key/value pair; a line is"),
        ("a = " + "[" * 5000, 1, "nested too deeply"),
        ("a = " + "9" * 5000, 1, "Exceeds the limit"),
        ("#" * (LONGEST + 1), 1, f"longer than {LONGEST} characters"),
    ],
)
def test_invalid_toml_says_the_line(text: str, line: int, message: str, folder: Path) -> None:
    [(at, severity, said)] = found(text, folder)
    assert (at, severity) == (line, "error")
    assert said.startswith(f"not valid TOML: {message}")


GOOD = """\
base_environment = "common"
image = "${SCRATCH}/f.sqsh"
mounts = ["${SCRATCH}:${SCRATCH}", './t:/t:ro+private', "./f.sqsh:/data:sqsh", "${NONE:-/}:/root"]
workdir = "/w/${NONE:-}"
entrypoint = true
env = { A = "", PATH = "${SCRATCH}/bin:$${PATH}", PYTHONPATH = "/m:${PYTHONPATH:-}" }

[annotations]
com.hooks.ssh = { enabled = "true", authorize_ssh_key = "${SCRATCH}/id.pub", port = "1" }
"com.hooks.aws_ofi_nccl.variant" = "cuda-dl"
com.pyxis.entrypoint_log = "true"
com.sarus.perfmon = "true"
"""


def test_what_is_allowed_is_not_found(folder: Path) -> None:
    assert found(GOOD, folder) == []
    assert found(GOOD.replace("\n", "\r\n"), folder) == []


@pytest.mark.parametrize(
    "image",
    [
        "ubuntu:24.04",
        "library/ubuntu:24.04",
        "me@nvcr.io#nvidia/pytorch:26.02-py3",
        "localhost:5000#a/b_c/d-e.f:V1.0_x",
        "a@sha256:" + "0" * 64,
        "./f.sqsh",
    ],
)
def test_images_that_are_right(image: str, folder: Path) -> None:
    assert found(f'image = "{image}"\n', folder) == []


@pytest.mark.parametrize("image", ["a b:1", "a#b#c:1", "a:", ":1", "a//../b:1", "a:1:2", "a@b@c:1"])
def test_images_that_are_none(image: str, folder: Path) -> None:
    [(line, severity, message)] = found(f'image = "{image}"\n', folder)
    assert (line, severity) == (1, "error")
    assert message.startswith(f"'{image}' is no image: write [USER@][REGISTRY#]IMAGE[:TAG]")


def test_the_file_of_this_repository_is_right(folder: Path) -> None:
    text = (ROOT / "edf.toml").read_text()
    assert found(text, folder, PWD="/home/me/jobkit") == []
    assert {"image", "mounts", "workdir", "env", "annotations"} <= set(tomllib.loads(text))
    assert [line for line, _, _ in found(text, folder)] == [
        text[: text.index('workdir = "${PWD}"')].count("\n") + 1
    ]


def test_every_key_of_the_repository_file_is_explained() -> None:
    before = ""
    for line in (ROOT / "edf.toml").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            assert before.startswith(("#", "com.hooks.")), line
        before = line


def test_on_another_machine_paths_are_not_looked_for(folder: Path) -> None:
    text = (
        'image = "/no.sqsh"\nmounts = ["/no:/a", "${NONE}:/b", "b:/c"]\nbase_environment = "no"\n'
    )
    elsewhere = found(text, folder, here=False)
    assert [(line, severity) for line, severity, _ in elsewhere] == [
        (2, "error"),  # b is relative on every machine
        (2, "warning"),
        (3, "warning"),
    ]
    here = found(text, folder)
    assert [line for line, severity, _ in here if severity == "error"] == [1, 2, 2, 2, 3]


@pytest.mark.parametrize("base", ['"${NONE}"', '["${NONE}"]', '"none"', '["common", "none"]'])
def test_what_an_unknown_base_may_hold_is_not_missed(base: str, folder: Path) -> None:
    variant = '[annotations]\ncom.hooks.aws_ofi_nccl.variant = "cuda-dl"\n'
    [(line, severity, _)] = found(f"base_environment = {base}\n{variant}", folder, here=False)
    assert (line, severity) == (1, "warning")


@pytest.mark.parametrize(
    ("value", "more", "ends"),
    [
        ("/a/${EMPTY}", {"EMPTY": ""}, None),
        ("${EMPTY:-/a}", {"EMPTY": ""}, None),
        ("${EMPTY:-a}", {"EMPTY": "/b"}, None),
        ("${EMPTY}", {"EMPTY": "b"}, "workdir 'b' does not begin with '/'"),
        ("/$$x", {}, None),
        ("/$(id)", {}, "a '$' that starts no variable"),
        ("/${1}", {}, "a '$' that starts no variable"),
        ("/$$$X", {}, "$X is not expanded"),
    ],
)
def test_variables(value: str, more: dict[str, str], ends: str | None, folder: Path) -> None:
    said = messages(f'{IMAGE}workdir = "{value}"\n', folder, **more)
    assert len(said) == (ends is not None)
    assert not said or said[0].startswith(str(ends))


def write_chain(folder: Path, levels: int) -> str:
    for level in range(1, levels):
        (folder / f"{level}.toml").write_text(f'base_environment = ["./{level + 1}.toml"]\n')
    (folder / f"{levels}.toml").write_text(IMAGE)
    return 'base_environment = "./1.toml"\n'


def test_ten_levels_of_base_environments_and_no_more(folder: Path) -> None:
    assert found(write_chain(folder, DEEPEST), folder) == []
    text = write_chain(folder, DEEPEST + 1)
    too_deep = "more than 10 levels of base environments: copy some of them into one file"
    assert found(text, folder) == [(1, "error", too_deep)]
    # The same chain entered low first: what is already known is still too deep by the other way.
    text = 'base_environment = ["./2.toml", "./1.toml"]\n'
    assert found(text, folder) == [(1, "error", too_deep)]


def test_a_file_may_be_inherited_twice(folder: Path) -> None:
    for name in "ab":
        (folder / f"{name}.toml").write_text('base_environment = "common"\n')
    assert found('base_environment = ["./a.toml", "./b.toml", "common"]\n', folder) == []


def test_a_later_base_environment_overwrites_an_earlier_one(folder: Path) -> None:
    off = '[annotations]\ncom.hooks.cxi.enabled = "false"\n'
    (folder / "off.toml").write_text(off)
    [(line, severity, message)] = found('base_environment = ["common", "./off.toml"]\n', folder)
    assert (line, severity) == (1, "error")
    assert message.startswith("com.hooks.aws_ofi_nccl.enabled needs the network")
    assert found('base_environment = ["./off.toml", "common"]\n', folder) == []


def test_base_environments_are_found_like_srun_does(folder: Path) -> None:
    text = 'base_environment = "common"\n'
    assert messages(text, folder, EDF_PATH="") == [
        "base environment 'common' was not found (looked for common.toml in /nowhere/.edf)"
    ]
    (folder / ".edf").mkdir()
    shutil.copy(folder / "envs" / "common.toml", folder / ".edf")
    assert found(text, folder, EDF_PATH="", HOME=str(folder)) == []
    assert found(text, folder, EDF_PATH=f"/nowhere:{folder / 'envs'}") == []
    assert found(f'base_environment = "{folder}/envs/common.toml"\n', folder) == []
    assert messages('base_environment = "common.toml"\n', folder) == [
        "base environment 'common.toml' is taken for a name: write ./common.toml or the whole path"
    ]


def test_a_base_environment_that_is_no_text(folder: Path) -> None:
    (folder / "b.toml").write_bytes(b"\xff")
    assert messages('base_environment = "./b.toml"\n', folder) == [
        "the base environment FOLDER/b.toml cannot be read: it is no text in UTF-8"
    ]


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    for name, value in environ(folder).items():
        monkeypatch.setenv(name, value)
    return folder


def test_command_without_a_finding(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "good.toml").write_text(GOOD)
    assert main(["good.toml"]) == Exit.OK
    assert capsys.readouterr().out == "1 file checked: 0 errors, 0 warnings\n"


def test_command_with_findings(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "w.toml").write_text('image = "a"\n')
    (here / "e.toml").write_text(f'{IMAGE}workdir = "a\\n\\u001bb"\n')
    assert main(["w.toml"]) == Exit.OK  # a warning is no error
    assert main(["w.toml", "e.toml", "none.toml", "."]) == Exit.USAGE
    assert capsys.readouterr().out.splitlines()[2:] == [
        "w.toml:1: warning: a has no tag, so that it may change: write a:TAG",
        f"e.toml:2: error: workdir 'a\\n\\x1bb' does not begin with '/': {WHOLE_PATH}",
        "none.toml: error: cannot be read: No such file or directory",
        ".: error: cannot be read: Is a directory",
        "4 files checked: 3 errors, 1 warning",
    ]


def test_command_on_another_machine(here: Path) -> None:
    (here / "e.toml").write_text('image = "/no.sqsh"\n')
    assert main(["e.toml"]) == Exit.USAGE
    assert main(["e.toml", "--no-paths"]) == Exit.OK


def test_command_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "e.toml").write_bytes(b'image = "a:1"\n# \xff\n')
    assert main(["--json", "e.toml"]) == Exit.USAGE
    message = "no text in UTF-8: save it as such"
    row = {"file": "e.toml", "line": 2, "severity": "error", "message": message}
    assert json.loads(capsys.readouterr().out) == [row]


def test_command_help_and_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "python -m jobkit check-edf edf.toml" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2


def test_command_on_the_repository_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", str(here))
    assert main([str(ROOT / "edf.toml")]) == Exit.OK
