"""Which files make a data set of IDX files, in which MNIST and its like are published."""

from pathlib import Path

from jobkit.errors import UsageError

FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def find(folder: Path) -> dict[str, Path]:
    """The four files of a data set, packed or not. Raises UsageError for one that is not there."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory of IDX files")
    paths = {}
    for part, name in FILES.items():
        names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
        path = next((folder / n for n in names if (folder / n).is_file()), None)
        if path is None:
            raise UsageError(f"{folder}: has no {name} or {name}.gz")
        paths[part] = path
    return paths
