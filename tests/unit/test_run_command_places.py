"""run.sh with a command in a container, and after a preflight; srun is a stub."""

from pathlib import Path

import pytest

from support.stub_srun import JOB, Kit

# The words before the image are its own; what follows runs inside, without a jobkit there.
APPTAINER = """#!/bin/sh
echo "apptainer $*" | head -1 >> "$NOTES"
while [ "$1" != image.sif ]; do shift; done
shift
exec "$@"
"""
SHOW = ["bash", "-c", 'echo "rank $RANK of $WORLD_SIZE: $1"', "-", "a b"]


@pytest.fixture
def run(tmp_path: Path) -> Kit:
    made = Kit(tmp_path)
    (tmp_path / "apptainer").write_text(APPTAINER)
    (tmp_path / "apptainer").chmod(0o755)
    return made


def site(run: Kit, text: str) -> list[str]:
    (run.folder / "own.toml").write_text(text)
    return ["--site", str(run.folder / "own.toml")]


def test_the_ranks_are_inside_the_container(run: Kit) -> None:
    own = 'container = "apptainer"\nimage = "image.sif"\nmounts = ["/data:/data"]\n'
    done = run(*site(run, own), "--", *SHOW, **JOB)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert sorted(said) == ["rank 0 of 2: a b", "rank 1 of 2: a b"]
    assert run.notes.read_text().count("apptainer exec --nv --bind /data:/data image.sif bash") == 2
    assert run.outcome()["status"] == "ok"


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ('container = "pyxis"\nimage = "a/b:1"', "--container-image=a/b:1"),
        ('container = "edf"\nimage = "own"', "--environment=own"),
    ],
)
def test_srun_starts_the_container(run: Kit, text: str, option: str) -> None:
    done = run(*site(run, text), "--", *SHOW, **JOB)
    assert done.returncode == 0 and done.stdout.count("of 2: a b") == 2, done.stderr
    assert option in run.notes.read_text().splitlines()


def checked(run: Kit, code: int) -> dict[str, str]:
    """A Python that notes what it is asked for, and says how the preflight ended."""
    stub = run.folder / "checking"
    stub.write_text(f'#!/bin/sh\necho "python $*" >> "$NOTES"\nexit {code}\n')
    stub.chmod(0o755)
    return {**JOB, "JOBKIT_PYTHON": str(stub)}


def test_a_preflight_asks_for_no_data_of_the_training_and_then_the_command_runs(run: Kit) -> None:
    done = run("--preflight", "--", *SHOW, **checked(run, 0))
    assert done.returncode == 0 and done.stdout.count("of 2: a b") == 2, done.stderr
    (asked, *more) = [x for x in run.notes.read_text().splitlines() if x.startswith("python")]
    assert not more and asked.endswith("-- --dataset synthetic")
    assert "-m jobkit.checks.preflight.cli" in asked


def test_a_preflight_that_fails_starts_no_command(run: Kit) -> None:
    done = run("--preflight", "--", *SHOW, **checked(run, 5))
    assert done.returncode == 5 and "of 2: a b" not in done.stdout
    assert "preflight failed: nothing was trained" in done.stderr


def test_a_dry_run_with_a_preflight_only_checks(run: Kit) -> None:
    done = run("--preflight", "--dry-run", "--", *SHOW, **checked(run, 0))
    assert done.returncode == 0 and "of 2: a b" not in done.stdout, done.stderr
    assert "jobkit.checks.preflight.cli" in run.notes.read_text()
    assert not run.run_dir.exists()
