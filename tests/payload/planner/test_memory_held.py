"""What a rank will keep is predicted, and found on its tensors, for every strategy."""

import re
from pathlib import Path

import pytest

from support.rigs import SMALL, Start

TINY = (*SMALL, "--epochs", "1", "--global-batch-size", "128", "--warmup-iterations", "1")
PARTS = ("total", "parameters", "gradients", "optimizer", "buffers")
LINE = re.compile(
    r"memory (predicted|held) \S+ this rank: (.*) bytes: "
    r"parameters (.*), gradients (.*), optimizer (.*), buffers (.*)"
)
# Layers whose sizes no number of ranks divides, a frozen one, and statistics beside them.
MODEL = """
from torch import nn

def uneven():
    model = nn.Sequential(
        nn.Conv2d(3, 13, 5, stride=4), nn.BatchNorm2d(13), nn.ReLU(), nn.Flatten(),
        nn.Linear(13 * 49, 301), nn.ReLU(), nn.Linear(301, 37), nn.Linear(37, 10),
    )
    model[6].bias.requires_grad_(False)
    return model
"""


def memory_of(log: Path) -> dict[str, dict[str, int]]:
    """What a rank's log says of its memory: predicted and held, by part, in bytes."""
    found = {}
    for match in LINE.finditer(log.read_text()):
        what, *amounts = match.groups()
        found[what] = dict(zip(PARTS, (int(x.replace(",", "")) for x in amounts), strict=True))
    return found


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, ["--strategy", "ddp", "--no-ddp-gradient-as-bucket-view", "--ddp-comm-hook", "bf16"]),
        (2, ["--strategy", "fsdp", "--optimizer", "adamw"]),
        (2, ["--strategy", "pp", "--pipeline-schedule", "interleaved"]),
        *(
            pytest.param(world, words.split(), marks=pytest.mark.long)
            for world, words in (
                (1, "--strategy single"),
                (1, "--strategy dp --optimizer adamw"),
                (2, "--strategy ddp --momentum 0 --no-nesterov --precision bf16"),
                (2, "--strategy fsdp --no-fsdp-reshard-after-forward"),
                (4, "--strategy fsdp --fsdp-hybrid-replicas 2 --optimizer adamw"),
                (2, "--strategy mp --optimizer adam"),
                (4, "--strategy pp --pipeline-stages 2"),
            )
        ),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else "-".join(w.strip("-") for w in x[1:]),
)
def test_what_is_predicted_is_held(
    forge: Start, tmp_path: Path, world: int, words: list[str]
) -> None:
    (tmp_path / "uneven.py").write_text(MODEL)
    done = forge(world, *TINY, "--model", "uneven:uneven", *words, cwd=str(tmp_path))
    assert done.codes == [0] * world, done.out
    logs = [memory_of(done.paths.rank_log(0, rank)) for rank in range(world)]
    for log in logs:
        for part in PARTS:
            assert log["predicted"][part] == pytest.approx(log["held"][part], rel=0.05), part
    for what, mib in (
        ("predicted", done.record("run_start")["predicted_memory_mib"]),
        ("held", done.records("epoch")[-1]["held_memory_mib"]),
    ):
        assert mib * 2**20 == pytest.approx(max(log[what]["total"] for log in logs))


def test_kinds_of_memory_are_told_apart(forge: Start) -> None:
    (epoch,) = forge(1, *TINY, "--strategy", "single").records("epoch")
    assert epoch["allocated_memory_mib"] is None  # there is no GPU
    assert epoch["reserved_memory_mib"] is None
    assert epoch["peak_memory_mib"] == epoch["resident_memory_mib"]
    assert epoch["resident_memory_mib"] > 100 > epoch["held_memory_mib"] > 1
