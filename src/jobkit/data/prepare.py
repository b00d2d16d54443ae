"""`python -m jobkit prepare`: download or convert the images once, with network access.

    python -m jobkit prepare                                  CIFAR-10
    python -m jobkit prepare --dataset folder:/data/images

Compute nodes often have no network: run this on a login node, on a file system that both see.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import Exit, Parser, command, one_of
from jobkit.paths import data_root, expanded
from jobkit.spec.dataset import WITH_PATH, check_source


def parser() -> Parser:
    options = Parser(
        prog="jobkit prepare",
        description="Download or convert images into the file that the jobs map into memory.",
    )
    options.add_argument(
        "--dataset",
        default="cifar10",
        metavar="cifar10|folder:PATH|idx:PATH",
        help="what to prepare; PATH is a directory (default cifar10)",
    )
    options.add_argument(
        "--data-dir",
        type=Path,
        help="directory of data and caches (default: $JOBKIT_DATA_DIR, else ~/.cache/jobkit)",
    )
    return options


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if not args.dataset.startswith(WITH_PATH):
        one_of("dataset", args.dataset, ("cifar10", "synthetic", "folder:PATH", "idx:PATH"))
    check_source(args.dataset)
    from jobkit.data.images import find_source, open_prepared, prepare

    path, read = find_source(args.dataset, expanded(args.data_dir or data_root()), None, None)
    prepare(path, read, lambda line: print(line, flush=True))
    data = open_prepared(path)
    print(f"{path}: {len(data.train.labels):,} training and {len(data.test.labels):,} test images")
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
