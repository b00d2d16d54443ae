"""run_benchmarks.py before anything starts: the plan, dry runs, and bad input."""

import os
import re
import shlex
import time
from pathlib import Path

import pytest

from jobkit.launch import cli
from jobkit.spec.study import Study
from support.place import script
from support.refusals import refusal


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    """The words of each command that a dry run on this machine prints, as a shell reads them."""
    assert cli.main(["--site", "local", "--dry-run", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [shlex.split(line) for line in lines if line.startswith("bash ")]


def value(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize("where", [["--site", "local"], ["--to", "kubernetes", "--image", "x"]])
def test_a_folder_of_given_logs_takes_no_plan(logs: Path, where: list[str], capsys) -> None:
    (logs / "strong").mkdir(parents=True)
    (logs / "strong" / "logs.json").write_text("{}")
    assert cli.main(["--study", "strong", *where]) == 2
    assert "has the runs of collect --logs: give another --name" in capsys.readouterr().err
    assert not (logs / "strong" / "plan.json").exists()


def test_gpus_are_asked_for_without_a_profile(monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # of a machine without Slurm
    study = ["--study", "demo", "--site", "slurm", "--dry-run", "--strategies", "ddp"]
    for words, asked in (
        ("--gpus-per-node 2", ["--gpus-per-node=1", "--gpus-per-node=2"]),
        ("--sbatch --gpus-per-node=2", ["--gpus-per-node=2"] * 2),
        ("--device cpu --gpus-per-node 2", []),
    ):
        assert cli.main([*study, *words.split()]) == 0
        said = capsys.readouterr().out
        assert re.findall("^#SBATCH (--(?:gpus|gres).*)", said, re.MULTILINE) == asked
    # A training that asks for no GPU is refused, unless on the CPU.
    assert "--gpus-per-node N" in refusal(cli.main, study, capsys)


def test_a_dry_run_needs_no_controller(tmp_path: Path, monkeypatch, capsys) -> None:
    """Where it is needed to know the cluster, and does not answer, that is one line."""
    script(tmp_path / "sbatch", "#!/bin/sh\nexit 1\n")
    silent = "echo 'Unable to contact slurm controller' >&2; exit 1"
    script(tmp_path / "scontrol", f"#!/bin/sh\n{silent}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(conf := tmp_path / "slurm.conf"))
    words = ["--dry-run", "--study", "demo", "--strategies", "ddp", "--device", "cpu"]
    assert cli.main([*words, "--site", "minicluster"]) == 0
    assert "#SBATCH" in capsys.readouterr().out
    for named in ([], ["--site", "slurm"]):  # whose defaults are not those of the cluster's profile
        said = refusal(cli.main, [*words, *named], capsys)
        assert "does not answer (Unable to contact slurm controller)" in said
    conf.write_text("ClusterName=here\n")
    assert cli.main(words) == 0 and "site here (" in capsys.readouterr().out


@pytest.mark.parametrize(("cores", "gpus", "sizes"), [(2, 0, "12"), (64, 0, "1248"), (2, 4, "124")])
def test_the_default_study_fits_this_machine(cores, gpus, sizes, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(cli, "count_gpus", lambda: gpus)
    commands = dry_run(capsys)
    assert len(commands) == 2 * 3 * len(sizes)  # ddp and fsdp, 3 repeats
    assert {value(words, "--nproc-per-node") for words in commands} == set(sizes)


BAD = [
    (["--study", "demo", "--gpu-request", "gres"], "--gpu-request is an option for Slurm"),
    (["--study", "demoo"], "did you mean 'demo'"),
    (["--study", "demo", "--gpus", "2x2"], "this machine is one"),
    (["--study", "demo", "--max-running", "2"], "--max-running is an option for Slurm"),
    (["--study", "demo", "--", "oops"], "demo is a study of jobkit's own training"),
    (["--study", "demo", "--", "--nice=100"], "write an option of sbatch as --sbatch --nice=100"),
    (["--study", "demo", "--"], "-- needs a command after it"),
    (["--study", "demo", "--sbatch", "oops"], "'oops'"),
    (["--study", "demo", "--dataset", "folder:/none"], "/none: no such directory of images"),
    # What a person types wrongly, with the right form.
    (["--gpu", "1"], "did you mean '--gpus'?"),
    (["-N", "2"], "or as NODESxRANKS: --gpus 2x4"),
    (["--batch-size", "32"], "did you mean --global-batch-size or --batch-size-per-rank"),
    (["--batch-size", "32", "--", "./a"], "comes after it: -- python train.py --batch-size 32"),
    (["--gpus", "1,2"], "separate sizes by spaces: --gpus 1 2"),
    (["--gpus", "1", "--", "train.py"], "no command 'train.py' on this machine: write python"),
    (["--gpus", "1", "--", "./a", "{rundir}"], "at 1 rank: {rundir}: unknown name"),
    (["--name", "x", "--gpus", "1", "python", "train.py"], "a command comes after --"),
    (["--name", "x", "python", "train.py"], "write a command after --"),
    (["--name", "nosuch"], "no study 'nosuch'"),
    (["--gpus", "1", "--", "python", "nosuch.py"], "python nosuch.py: no such file in"),
    (["--launcher", "mpirun", "--", "./a"], "once -- mpirun -n {ranks} ..."),
    (["--gpus", "2", "--", "torchrun", "--nproc-per-node=2", "a.py"], "torchrun starts the ranks"),
    (["--gpus", "2", "--", "python", "-m", "torch.distributed.run", "a.py"], "leave it out"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(w[2:]) for w, _ in BAD])
def test_bad_input_is_one_line_and_2_and_nothing_is_written(words, said, logs, capsys) -> None:
    assert said in refusal(cli.main, [*words[:2], "--site", "local", *words[2:]], capsys)
    assert not logs.exists()


def test_each_run_of_a_command_has_a_folder_of_its_own(logs: Path, capsys) -> None:
    """And the words of a dry run are read back whole by a shell."""
    own = "--gpus 1 2 --name own --why 3 -- python -c0 --out={run_dir}/out {{kept}}"
    odd = 'it\'s a "folder" $HOME'
    one, two = dry_run(capsys, *own.split(), odd)
    assert value(one, "--run-dir") != value(two, "--run-dir")
    for words in (one, two):
        folder = value(words, "--run-dir")
        assert value(words, "--why") == "3" and Path(folder).parent == logs / "own"
        command = ["python", "-c0", f"--out={folder}/out", "{kept}", odd]
        assert words[words.index("--") + 1 :] == command
    assert not logs.exists()


def test_a_dry_run_has_the_work_that_the_study_stated_before(capsys) -> None:
    work = {"unit": "images", "per_step": 512}
    Study.of_command(("true",), name="own", gpus=(1,), work=work).expand().save()
    (words,) = dry_run(capsys, "--gpus=2", "--repeats=1", "--name=own", "--", "true")
    assert value(words, "--work-per-step") == "512"
    words = ["--gpus", "1", "2", "--scaling", "weak"]
    args = cli.make_parser(has_command=True).parse_args(words)
    args.command = ("true",)
    plan = cli.make_plan(args)
    assert {run.scaling for run in plan.runs.values()} == {"weak"}


def test_a_script_that_is_not_there_is_refused_for_slurm_too(capsys) -> None:
    """Before each size and repeat waits in a queue for it; a container may have it."""
    words = "--site minicluster --gpus 1 --name x --dry-run -- python nosuch.py"
    assert cli.main(words.split()) == 2
    assert "python nosuch.py: no such file in" in capsys.readouterr().err
    assert cli.main(words.replace("minicluster", "alps").split()) == 0


def test_runs_that_start_in_one_folder_are_noted_once(capsys) -> None:
    note = "note: all 2 runs start in this folder"
    for words, n in ("1 2 -- true -o=o", 1), ("1 2 -- true -o={run_dir}", 0), ("1 -- true x", 0):
        assert cli.main(f"--site local --name x --dry-run --gpus {words}".split()) == 0
        said = capsys.readouterr().out
        assert said.count(note) == n == said.count("{run_dir},")


def test_what_is_kept_is_of_this_program_and_the_name_alone_goes_on(
    tmp_path, logs, monkeypatch, capsys
) -> None:
    words = ["--site", "local", "--name", "x", "--gpus", "1", "--", "python", "p.py"]
    for place in ("b", "a"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "p.py").write_text("print('done')")
        monkeypatch.chdir(tmp_path / place)
    assert cli.main(words) == 0
    (tmp_path / "a" / "p.py").write_text("print('mended')")
    later = time.time() + 60
    os.utime(tmp_path / "a" / "p.py", (later, later))
    capsys.readouterr()
    assert cli.main(["--name", "x", "--site", "local"]) == 0
    said = capsys.readouterr().out
    assert "p.py has changed since runs of it that are kept" in said and "1 ok already" in said
    monkeypatch.chdir(tmp_path / "b")
    assert cli.main(words) == 2
    assert (
        f"is of another program, {tmp_path}/a/p.py: give another --name" in capsys.readouterr().err
    )


def test_variables_of_sbatch_are_said_to_have_no_effect(monkeypatch, capsys) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "centre")
    assert cli.main(["--site", "minicluster", "--gpus", "1", "--dry-run", "--", "true"]) == 0
    assert "SBATCH_ACCOUNT of the environment has no effect: say it" in capsys.readouterr().out


def test_the_default_study_is_told_and_on_slurm_named(tmp_path, logs, monkeypatch, capsys) -> None:
    started: list[int] = []
    monkeypatch.setattr(cli, "start", lambda prepared: started.append(len(prepared.run_ids)))
    monkeypatch.setattr(cli.os, "sched_getaffinity", lambda _: {0})
    assert cli.main(["--site", "local", "--device", "cpu"]) == 1  # none was started
    said = capsys.readouterr().out
    assert started == [6] and "6 runs planned, 6 to start, 1 at a time" in said
    assert "sizes 2, 4, 8 of study strong are left out" in said
    assert "smaller: --study demo" in said and "sizes: 1; how long it takes" in said
    script(tmp_path / "sbatch", "#!/bin/sh\n")
    (tmp_path / "slurm.conf").write_text("ClusterName=here\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert cli.main(["--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert "cifar10 is not in" in said.out and "jobkit prepare --dataset cifar10" in said.out
    assert "24 runs planned" in said.out and "up to 12 node-hours" in said.out
    assert "or 48 if each is also requeued 3 times (--max-restarts)" in said.out
    assert said.err.count("\n") == 1 and "run_benchmarks.py --study strong" in said.err
    assert started == [6] and not logs.exists()


def test_help_is_short_and_each_topic_has_its_options(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = {}
    for topic in ("", "-training", "-slurm", "-kubernetes"):
        with pytest.raises(SystemExit):
            cli.main([f"--help{topic}"])
        texts[topic] = capsys.readouterr().out
    assert len(texts[""].splitlines()) <= 90
    options = {t: set(re.findall(r"^  (--[a-z0-9-]+)", text, re.M)) for t, text in texts.items()}
    assert "--epochs" in options["-training"] and "--within-allocation" in options["-slurm"]
    assert "--to" in options["-kubernetes"] and "--gpus" in options[""]
    listed = set.union(*options.values())
    hidden = set(cli.make_parser()._option_string_actions) - listed
    assert [name for name in hidden if not re.match("--no-|--help$|-[a-zA-Z]$", name)] == []
    assert sum(map(len, options.values())) == len(listed)  # each once
    with pytest.raises(SystemExit):
        cli.main(["--help-training", "--", "./a"])
    assert "--momentum" not in capsys.readouterr().out
