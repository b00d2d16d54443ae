"""Export a trained model for programs without jobkit."""

import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import Exit, Parser, UsageError, command, whole
from jobkit.gpus import hide_gpus
from jobkit.paths import short_path

EPILOG = """examples:
  python -m jobkit export logs/single/RUN --to aoti
  python -m jobkit export logs/single/RUN --to aoti --jacobian
  python -m jobkit export logs/single/RUN --to onnx --max-batch 256
  python -m jobkit export logs/single/RUN --to state_dict --out weights

aoti: for C++ with libtorch (hpc/inference), made by AOTInductor; onnx: for ONNX Runtime;
state_dict: for PyTorch. Beside the model are eight images, the expected outputs, and manifest.json.

exit codes: 0 exported, loaded again and compared; 2 wrong usage, no sound checkpoint, or a model
that cannot be exported; 4 the result differs from the model that was trained: nothing is kept
"""


def parser() -> Parser:
    parser = Parser(prog="jobkit export", description=__doc__.splitlines()[0], epilog=EPILOG)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run's folder, or one of its checkpoints")
    add("--to", required=True, choices=("aoti", "onnx", "state_dict"), help="format")
    add("--out", type=Path, metavar="DIR", help="a new folder (default: RUN/export/FORMAT)")
    batch = "aoti, onnx: largest batch (default 1024); the smallest is 1"
    add("--max-batch", type=whole(1, 1 << 20), default=1024, metavar="N", help=batch)
    derivative = "aoti: also the derivative of the outputs by the input, as a second package"
    add("--jacobian", action="store_true", help=derivative)
    add("--model", metavar="NAME", help="the run's own model, package.module:factory: import it")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.to != "aoti" and args.jacobian:
        raise UsageError("--jacobian is of --to aoti")
    out = args.out or args.run / "export" / args.to
    if not args.run.is_dir():
        raise UsageError(f"{short_path(args.run)}: no such folder")
    if out.exists():
        raise UsageError(f"{short_path(out)} exists: remove it, or name another folder with --out")
    hide_gpus()  # before torch is imported: what is exported is for the CPU
    from jobkit.export import formats
    from jobkit.export.weights import trained_model

    formats.check_tools(args.to)
    trained = trained_model(args.run, args.model, _warn)
    unfinished = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    unfinished.mkdir(parents=True)
    try:
        difference, jacobian = formats.write_folder(
            unfinished, trained, args.to, args.max_batch, args.jacobian
        )
        text = f"largest difference {difference:.3g} of {formats.TOLERANCE:g} allowed"
        agrees = difference <= formats.TOLERANCE  # a NaN is not
        if jacobian is not None:
            text += f", Jacobian {jacobian:.3g} of {formats.JACOBIAN_TOLERANCE:g}"
            agrees = agrees and jacobian <= formats.JACOBIAN_TOLERANCE
        if not agrees:
            _warn(f"the exported model differs from the trained one: {text}")
            return Exit.THRESHOLD
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{short_path(out)}: {trained.folder.name} as {args.to}, {text}")
    return Exit.OK


def _warn(text: str) -> None:
    print(f"jobkit: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(None))
