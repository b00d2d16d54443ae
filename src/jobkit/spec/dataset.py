"""Names of data sources, and the checks of them that need no torch: for the login node."""

from pathlib import Path

from jobkit.errors import UsageError
from jobkit.paths import data_root, expanded

FOLDER = "folder:"
IDX = "idx:"
WITH_PATH = (FOLDER, IDX)
IDX_FILES = {  # in which MNIST and its like are published
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def folder_path(dataset: str) -> Path | None:
    """The absolute path of a folder: or idx: source; None for any other source."""
    if not dataset.startswith(WITH_PATH):
        return None
    return expanded(dataset.partition(":")[2])


def check_source(dataset: str) -> None:
    """Raise UsageError, naming the path, for an image folder or IDX files that cannot be used.

    Looks at names only; what lies inside the images shows when they are converted.
    """
    if (path := folder_path(dataset)) is None:
        return
    if dataset in WITH_PATH:
        raise UsageError(f"{dataset} needs a path, as {dataset}/data/images")
    if dataset.startswith(IDX):
        find_idx(path)
        return
    try:
        if not path.is_dir():
            packed = "; unpack it first" if path.exists() else ""
            raise UsageError(f"{path}: no such directory of images{packed}")
        parts = {p: {f.name for f in (path / p).glob("*/")} for p in ("train", "test")}
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    for part, classes in parts.items():
        if not classes:
            raise UsageError(f"{path}: no class folder in {part}/; needs {part}/<class>/<image>")
    train, test = parts.values()
    only = [f"{c} only in train/" for c in sorted(train - test)]
    only += [f"{c} only in test/" for c in sorted(test - train)]
    if only:
        raise UsageError(f"{path}: class folders differ: {', '.join(only[:5])}")


def absence(dataset: str, data_dir: str | None) -> str:
    """What to do where CIFAR-10 is not on this machine; the nodes may have it, or download it."""
    if dataset != "cifar10":
        return ""
    folder = expanded(data_dir) if data_dir else data_root()
    names = ("cache/cifar10-v*.pt", "cifar-10-batches-py", "cifar-10-python.tar.gz")
    if any(True for name in names for _ in folder.glob(name)):
        return ""
    do = f"python -m jobkit prepare --dataset cifar10{f' --data-dir {folder}' if data_dir else ''}"
    return f"cifar10 is not in {folder} here; if the nodes have no network, first: {do}"


def find_idx(folder: Path) -> dict[str, Path]:
    """The four files of an IDX data set, packed or not. Raises UsageError where one is absent."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory of IDX files")
    paths = {}
    for part, name in IDX_FILES.items():
        names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
        path = next((folder / n for n in names if (folder / n).is_file()), None)
        if path is None:
            raise UsageError(f"{folder}: has no {name} or {name}.gz")
        paths[part] = path
    return paths
