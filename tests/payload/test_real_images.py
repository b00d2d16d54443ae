"""A shortened training on real images: it learns, and two ranks learn what one does."""

import os
from pathlib import Path

import pytest

from support.rigs import NO_BREAKDOWN, ROOT, Start

TAR = Path(
    os.environ.get("JOBKIT_TEST_IMAGES", ROOT.parent / "shared" / "data" / "cifar10-jpeg.tar")
)


@pytest.mark.skipif(not TAR.exists(), reason=f"no real images: {TAR} is absent")
def test_one_and_two_ranks_learn_the_same_from_real_images(forge: Start) -> None:
    words = ["--dataset", f"folder:{TAR}", "--train-samples", "4000", "--test-samples", "1000"]
    # fp32: a processor that has no bf16 takes ten times as long with it.
    words += [*NO_BREAKDOWN, "--epochs", "2", "--global-batch-size", "128", "--precision", "fp32"]
    one = forge(1, *words, "--strategy", "single", timeout_s=800)
    two = forge(2, *words, "--strategy", "ddp", timeout_s=800)
    assert one.codes + two.codes == [0, 0, 0], one.out + two.out
    assert one.record("run_start")["train_samples"] == 4000
    # Chance is 0.10; after two short epochs it was 0.32.
    assert min(one.accuracies()[-1], two.accuracies()[-1]) > 0.25
    assert one.accuracies()[-1] == pytest.approx(two.accuracies()[-1], abs=0.02)
    assert one.losses()[-1] == pytest.approx(two.losses()[-1], rel=0.05)
