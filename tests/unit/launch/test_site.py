"""Sites, their options of sbatch, and what run.sh does with them."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.launch import site as site_module
from jobkit.launch.command import LaunchRequest
from jobkit.launch.site import Site, known_sites, minutes, site_of_cluster
from jobkit.launch.slurm_options import Shape as S
from jobkit.launch.slurm_options import make_batches, sbatch_options, verbatim
from jobkit.launch.slurm_submit import script
from jobkit.spec.study import Study
from support.place import ROOT
from support.stub_srun import Kit

GOLDEN = ROOT / "tests" / "golden" / "scripts"


def load(tmp_path: Path, text: str) -> Site:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return Site.load(path)


def test_the_profiles_that_are_delivered() -> None:
    assert {"alps", "example", "minicluster"} <= set(known_sites())
    for name in known_sites():
        assert Site.load(name).name == name
    assert site_of_cluster("clariden").name == "alps"
    assert Site.load("alps").env["NCCL_LL128_C2C"] == "0"  # with it sums may be wrong
    assert site_of_cluster("elsewhere").name == "elsewhere"


def test_two_profiles_for_one_cluster_are_not_chosen_from(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(site_module, "SITES", tmp_path)
    load(tmp_path, "clusters = ['here', 'b']")
    assert site_of_cluster("here").source == str(tmp_path / "mine.toml")
    (tmp_path / "other.toml").write_text("clusters = ['here']")
    with pytest.raises(UsageError, match=r"mine.toml and .*other.toml are both for cluster here"):
        site_of_cluster("here")
    assert (site_of_cluster("b").name, site_of_cluster("c").source) == ("mine", "")


def test_the_example_explains_every_key(tmp_path: Path) -> None:
    text = (ROOT / "hpc" / "sites" / "example.toml").read_text()
    # Its comments hold keys too: "# key = value".
    keys = re.compile(r"^(?:# )?(\[?[a-z_]+)(?:\]$| = )", re.MULTILINE).findall(text)
    known = {f.name for f in fields(Site)} - {"name", "source"}  # the file's
    assert sorted(key.lstrip("[") for key in keys) == sorted(known)
    every = re.sub(r"^# ([a-z_]+ = )", r"\1", text, flags=re.MULTILINE)
    given = load(tmp_path, every)
    assert given.partition and given.python and given.interface_suffix


def test_a_broken_profile_names_its_file_and_fault(tmp_path: Path) -> None:
    for text, said in [
        ("partitoin = 'x'", "unknown key 'partitoin'; did you mean 'partition'"),
        ("partition = 3", "partition = 3: must be a string"),
        ("[env]\n'a b' = 'x'", "is not a name of an environment variable"),
        ("container = 'edf'", "needs image"),
        ("container = 'apptainer'\nimage = '--bind=/'", "begins as an option"),
        ("time = '1:2:3:4'", "must be minutes"),
        ('partition = "a\\nb"', "has a control character"),
    ]:
        with pytest.raises(UsageError, match=rf"mine\.toml: .*{said}"):
            load(tmp_path, text)


def test_times_of_slurm() -> None:
    known = {"30": 30, "1:30": 1.5, "01:30:00": 90, "2-0": 2880, "1-02:30": 1590, "0:0:30": 0.5}
    assert {text: minutes(text) for text in known} == known


def test_dialects_of_asking_for_gpus(tmp_path: Path) -> None:
    """A run of dp drives all that it sees; a node takes no more ranks than it has GPUs."""
    for text, key, value, of_dp in (
        ("", "", "", ""),
        ("gpus_per_node = 4\ngpu_type = 'a100'", "gpus-per-node", "a100:2", "a100:4"),
        ("gpus_per_node = 4\ngpu_request = 'gres'", "gres", "gpu:2", "gpu:4"),
        ("gpus_per_node = 4\ngpu_request = 'none'", "", "", ""),
    ):
        site = load(tmp_path, text)
        for shape, expected in ((S(3, 2), value), (S(3, 1, True), of_dp)):
            options = sbatch_options(shape, site, {}, "name")
            asked = {k: v for k, v in options.items() if "gpu" in k or k == "gres"}
            assert asked == ({key: expected} if key else {})
            size = (options["nodes"], options["ntasks-per-node"])
            assert size == ("3", str(shape.ranks_per_node))
    with pytest.raises(UsageError, match=r"8 GPUs on a node: site 'mine' has 4; .*--gpus 16"):
        sbatch_options(S(2, 8), site, {}, "s")


def test_what_the_user_gives_wins(tmp_path: Path) -> None:
    site = load(tmp_path, "partition = 'a'\ntime = '10'\nsbatch = ['--nice=5', '--comment=x y']")
    given = {"partition": "b", **verbatim(["--comment", "z", "--exclusive"])}
    options = sbatch_options(S(1, 1), site, given, "n")
    assert options["partition"] == "b" and options["time"] == "10" and options["nice"] == "5"
    assert options["comment"] == "z" and options["exclusive"] is True


def plan():
    return Study(name="golden", strategies=("ddp", "fsdp"), gpus=(2, "2x4"), repeats=2).expand()


def test_one_batch_a_shape_and_node_hours(tmp_path: Path) -> None:
    site = load(tmp_path, "time = '00:30:00'\ngpus_per_node = 4")
    whole = plan()
    first, second = make_batches(whole, list(whole.runs), site, LaunchRequest())
    assert [len(first.run_ids), len(second.run_ids)] == [4, 4]
    assert [first.node_hours, second.node_hours] == [4 * 0.5, 4 * 2 * 0.5]
    request = LaunchRequest(within_allocation=True)
    (batch,) = make_batches(whole, list(whole.runs), site, request)
    names = ("nodes", "ntasks-per-node", "time")
    assert [batch.options[name] for name in names] == ["2", "4", "240"]
    assert batch.node_hours == 2 * 4
    request = LaunchRequest(within_allocation=True, options={"time": "00:10:00"})  # of one run
    (batch,) = make_batches(whole, list(whole.runs), site, request)
    assert batch.options["time"] == "80"


@pytest.mark.parametrize("name", ["alps", "example", "minicluster"])
def test_scripts_compared_whole(name: str, monkeypatch) -> None:
    """The script of each site, frozen; what differs from machine to machine is given here."""
    monkeypatch.setattr("sys.executable", "/venv/bin/python")
    whole = plan()
    batches = make_batches(whole, list(whole.runs), Site.load(name), LaunchRequest(at_once=3))
    texts = [script(batch, Path("/logs/golden/.submitit")) for batch in batches]
    assert "\n\n".join(texts) == (GOLDEN / f"{name}.sh").read_text()


FAKE = '#!/usr/bin/env bash\nprintf "%s\\n" "$(basename "$0")" "$@" "X=${X-unset}" >> "$NOTES"\n'


def started(tmp_path: Path, text: str, *own: str) -> tuple[list[str], Any]:
    """What run.sh calls from srun on in an allocation of this site, and how it ended."""
    kit = Kit(tmp_path)
    kit.notes.unlink(missing_ok=True)
    for name in ("srun", "python"):
        kit.tool(name, FAKE)
    (tmp_path / "site.sh").write_text(load(tmp_path, text).shell())
    done = kit("--site-file", str(tmp_path / "site.sh"), *own, SLURM_JOB_ID="5")
    lines = kit.notes.read_text().split("\n") if kit.notes.exists() else []
    return lines[lines.index("srun") :] if "srun" in lines else [], done


def test_containers_reach_srun(tmp_path: Path) -> None:
    """With a training, and with a command, whose rank is a shell's text."""
    trains = ["python", "-m", "jobkit.payload.main"]
    for text, before_python in (
        ("container = 'edf'\nimage = 'edf.toml'", [f"--environment={ROOT / 'edf.toml'}"]),
        ("container = 'edf'\nimage = 'pytorch'", ["--environment=pytorch"]),
        ("container = 'pyxis'\nimage = 'a#b:c'\nmounts = ['/x:/x', '/y z:/y']",
         ["--container-image=a#b:c", "--container-mounts=/x:/x,/y z:/y"]),
        ("container = 'apptainer'\nimage = '/i m.sif'\ngpu_vendor = 'amd'",
         ["apptainer", "exec", "--rocm", "/i m.sif"]),
    ):  # fmt: skip
        for own, program in (([], trains), (["--", "true"], ["bash", "-c"])):
            words, done = started(tmp_path, text, *own)
            assert done.returncode == 0, done.stderr
            at = words.index(program[0])
            assert words[at - len(before_python) : at] == before_python
            assert "--kill-on-bad-exit=1" in words[:at]
            assert words[at : at + len(program)] == program


def test_the_environment_file_has_the_network_and_keeps_jobkit_on_the_path() -> None:
    data = tomllib.loads((ROOT / "edf.toml").read_text())
    hooks = data["annotations"]["com"]["hooks"]
    assert hooks["cxi"]["enabled"] == hooks["aws_ofi_nccl"]["enabled"] == "true"
    assert data["env"]["PYTHONPATH"] == "${PYTHONPATH:-}" and {"image", "mounts"} < {*data}


def test_environment_and_set_up_lines_reach_the_job(tmp_path: Path) -> None:
    odd = "a,b 'c' \"d\" $HOME `x`"
    text = f"setup = ['[ -z $SURELY_UNSET ]', 'export X=\"$X!\"']\n[env]\nX = '''{odd}'''"
    assert f"X={odd}!" in started(tmp_path, text)[0]


def test_a_set_up_line_that_fails_ends_the_job(tmp_path: Path) -> None:
    words, done = started(tmp_path, "setup = ['false # no such module', 'echo later']")
    assert (words, done.returncode) == ([], 1)
    assert "setup command failed: false" in done.stderr and "later" not in done.stdout
    block = "if true; then export X=block; fi"
    assert "X=block" in started(tmp_path, f'setup = ["{block}"]')[0]
    for line in ("if true; then", "fi", "# module load cuda", ""):
        with pytest.raises(
            UsageError, match=r"syntax error.*: write each command or block in one line"
        ):
            load(tmp_path, f'setup = ["{line}"]')
    (tmp_path / "cut.sh").write_text("srun_options=(")
    done = Kit(tmp_path)("--site-file", str(tmp_path / "cut.sh"), SLURM_JOB_ID="5")
    assert done.returncode == 1 and "cut.sh: syntax error" in done.stderr


def test_variables_that_a_site_sets(tmp_path: Path) -> None:
    """Where a site has set-up lines or a container, the login node's Python is not taken."""
    names = re.compile("(JOBKIT_PYTHON=.*)|export ((?:NCCL|GLOO)_SOCKET.*|JOBKIT_INTERFACE.*)")
    for text, expected in [
        ("", ""),
        ("setup = ['true']", "JOBKIT_PYTHON=python"),
        ("container = 'edf'\nimage = 'x'", "JOBKIT_PYTHON=python"),
        ("container = 'edf'\nimage = 'x'\npython = 'python3'", "JOBKIT_PYTHON=python3"),
        ("interface = 'hsn0'", "NCCL_SOCKET_IFNAME=hsn0 GLOO_SOCKET_IFNAME=hsn0"),
        ("interface_suffix = '-ib'", "JOBKIT_INTERFACE_SUFFIX=-ib"),
    ]:
        found = map(names.fullmatch, load(tmp_path, text).shell().split("\n"))
        assert " ".join(match[1] or match[2] for match in found if match) == expected


def test_no_text_is_more_to_slurm_than_it_says(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="control character"):
        sbatch_options(S(1, 1), load(tmp_path, ""), {"comment": "x\ntouch y"}, "n")
