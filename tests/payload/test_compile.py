"""--compile: the same losses, and an honest time of the compilation."""

import pytest

from support.rigs import NO_BREAKDOWN, Start


@pytest.mark.needs("g++")  # torch.compile on the CPU
def test_compiling_changes_no_loss_and_its_time_is_recorded(forge: Start) -> None:
    words = [
        "--dataset",
        "synthetic",
        "--train-samples",
        "64",
        "--test-samples",
        "32",
        *NO_BREAKDOWN,
    ]
    words += ["--model", "mlp", "--epochs", "1", "--global-batch-size", "32", "--lr", "0.02"]
    words += ["--eval-batch-size", "32", "--strategy", "single"]
    plain = forge(1, *words)
    compiled = forge(1, *words, "--compile", timeout_s=800)
    assert compiled.codes == [0], compiled.out
    assert compiled.losses() == pytest.approx(plain.losses(), rel=1e-3)
    startup = compiled.record("startup")
    # It is the first iteration, which is not in the epoch's time.
    assert startup["compile_s"] > compiled.record("epoch")["epoch_time_s"]
    assert startup["total_s"] > startup["compile_s"]
    assert startup["first_step_s"] is None
    assert [r["compile_s"] for r in plain.records("startup")] == [None, None]
