"""The names of files under logs/, and the names that could leave it."""

import os
from pathlib import Path

import pytest

from jobkit import paths
from jobkit.errors import UsageError


def test_a_hostile_name_is_refused_and_a_plain_one_taken() -> None:
    for name in ("", ".", "..", "a/b", "/a", "a..b", "a\nb", "a b", "-rf", "$(x)", "ä", "a\x00", 3):
        with pytest.raises(UsageError, match="run id"):
            paths.StudyPaths(Path("logs")).run(name)  # type: ignore[arg-type]
    for name in ("a", "ddp-n1-g2-b512-fp32-r0-3f9c1a", "A.b_c-9", "x" * 100):
        assert paths.check_name("study name", name) == name


def test_a_bare_name_is_no_file_of_the_current_folder(tmp_path, monkeypatch) -> None:
    """A file `alps` that lies there may be anybody's, and the job would source its lines."""
    monkeypatch.chdir(tmp_path)
    known, theirs, other = tmp_path / "hpc" / "alps.toml", tmp_path / "alps", tmp_path / "my.toml"
    known.parent.mkdir()
    for path in (known, theirs, other):
        path.touch()
    assert paths.find_named("site", "alps", known.parent) == known
    assert paths.find_named("site", "./alps", known.parent).resolve() == theirs
    assert paths.find_named("site", "my.toml", known.parent).resolve() == other
    for name, hint in (("alp", "did you mean 'alps'"), ("hpc", "one of: local, alps")):
        with pytest.raises(UsageError, match=hint):
            paths.find_named("site", name, known.parent, ("local",))


def test_attempts_are_found_by_folder_or_metrics(tmp_path: Path) -> None:
    run = paths.RunPaths(tmp_path)
    assert run.attempt_numbers() == []
    for name in ("attempts/0", "attempts/10", "attempts/x", "metrics"):
        (tmp_path / name).mkdir(parents=True)
    run.metrics(2).touch()
    (run.metrics_folder / "junk.jsonl").touch()
    assert run.attempt_numbers() == [0, 2, 10]


def test_where_logs_and_data_lie(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", "/l")
    monkeypatch.setenv("JOBKIT_DATA_DIR", "/d")
    assert (paths.logs_root(), paths.data_root()) == (Path("/l"), Path("/d"))
    monkeypatch.delenv("JOBKIT_DATA_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert paths.data_root() == Path("/c/jobkit")
    # Else the logs are in the checkout, or in the current folder.
    monkeypatch.delenv("JOBKIT_LOGS")
    monkeypatch.chdir(tmp_path)
    assert paths.logs_root() == tmp_path / "logs"
    for inside in (paths.REPOSITORY, paths.REPOSITORY / "docs"):
        monkeypatch.chdir(inside)
        assert paths.logs_root() == paths.REPOSITORY / "logs"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    path = tmp_path / "plan.json"
    paths.write_whole(path, "half a character: \ud800")
    assert path.read_text() == "half a character: \\ud800"
    paths.write_json(path, {"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        paths.write_whole(path, "half")
    assert paths.read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_torn_json_file_reads_as_none(tmp_path: Path) -> None:
    for content in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000):
        (tmp_path / "x.json").write_bytes(content)
        assert paths.read_json(tmp_path / "x.json") is None
    assert paths.read_json(tmp_path / "absent.json") is None
