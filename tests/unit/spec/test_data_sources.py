"""Image folders and IDX files that cannot be used, as the login node sees it: without torch."""

from pathlib import Path

from jobkit.spec.dataset import IDX_FILES, check_source, folder_path
from jobkit.spec.runspec import RunSpec
from support.idx_files import write_idx
from support.refusals import error_of


def test_good_sources_pass_and_others_are_named(tmp_path: Path) -> None:
    root = tmp_path / "my images"
    for folder, message in (
        ("", "no class folder in train/"),
        ("train/a", "no class folder in test/"),
        ("test/c", "class folders differ: a only in train/, c only in test/"),
    ):
        (root / folder).mkdir(parents=True)
        assert error_of(check_source, f"folder:{root}").startswith(f"{root}: {message}")
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "train" / "README").touch()
    for source in (f"folder:{tmp_path}", "synthetic"):
        check_source(source)
    assert folder_path("cifar10") is None
    (tmp_path / "images.tar").touch()
    for packed in (True, False):
        folder = write_idx(tmp_path / f"mnist-{packed}", packed)
        check_source(RunSpec(dataset=f"idx:{folder}").dataset)
    (folder / IDX_FILES["test_labels"]).unlink()
    for source, message in (
        (f"folder:{tmp_path}/images.tar", "no such directory of images; unpack it first"),
        (f"folder:{tmp_path}/absent", "absent: no such directory of images"),
        ("folder:", "folder: needs a path"),
        (f"idx:{tmp_path}/absent", "no such directory of IDX files"),
        ("idx:", "idx: needs a path"),
        (f"idx:{folder}", "has no t10k-labels-idx1-ubyte or "),
    ):
        assert message in error_of(check_source, source)
