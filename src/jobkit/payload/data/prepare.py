"""`python -m jobkit prepare`: fetch or convert the images once, where there is a network.

    python -m jobkit prepare                                  CIFAR-10
    python -m jobkit prepare --dataset folder:/data/images.tar

Compute nodes often have no network: run this on a login node, on a file system that both see.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import Exit, UsageError, one_of
from jobkit.paths import data_root
from jobkit.spec.dataset import FOLDER, check_source


def parser() -> argparse.ArgumentParser:
    """The command line of prepare."""
    made = argparse.ArgumentParser(
        prog="python -m jobkit prepare",
        description="Fetch or convert images into the cache that the jobs map into memory.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--dataset",
        default="cifar10",
        metavar="cifar10|folder:PATH",
        help="what to prepare; PATH is a directory or a .tar (default cifar10)",
    )
    made.add_argument(
        "--data-dir",
        type=Path,
        help="where data and caches lie (default: $JOBKIT_DATA_DIR, else ~/.cache/jobkit)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare a dataset; return the exit code."""
    args = parser().parse_args(argv)
    try:
        if not args.dataset.startswith(FOLDER):
            one_of("dataset", args.dataset, ("cifar10", "synthetic", "folder:PATH"))
        check_source(args.dataset)
        if args.dataset == "synthetic":
            print("synthetic is made by each run itself: there is nothing to prepare")
        else:
            _prepare(args.dataset, args.data_dir)
    except UsageError as error:
        print(f"jobkit: error: {error}", file=sys.stderr)
        return Exit.USAGE
    return Exit.OK


def _prepare(dataset: str, given_dir: Path | None) -> None:
    """Build the cache, or say that it is there, and what to do next."""
    from jobkit.payload.data.cache import cache_folder, ensure_cache, find_fault, open_cache
    from jobkit.payload.data.sources import find_source

    data_dir = (given_dir or data_root()).expanduser().absolute()
    source = find_source(dataset, data_dir, None, None)
    folder = cache_folder(source, data_dir)
    ready = folder.exists() and not find_fault(folder)
    if not ready:
        ensure_cache(source, data_dir, lambda line: print(line, flush=True))
    data = open_cache(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{'already prepared' if ready else 'prepared'}: {folder}")
    print(
        f"  {len(data.train.labels):,} training and {len(data.test.labels):,} test images, "
        f"{len(data.classes)} classes, {size / 1e6:,.1f} MB"
    )
    place = f" --data-dir {shlex.quote(str(data_dir))}" if given_dir else ""
    print(f"next: bash run.sh --dataset {shlex.quote(dataset)}{place}")


if __name__ == "__main__":
    sys.exit(main())
