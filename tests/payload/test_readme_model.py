"""The model of docs/own-model.md, taken from there and run with the commands that stand there."""

import re
import subprocess
from pathlib import Path

import pytest

from jobkit.paths import RunPaths
from support.rigs import ROOT, Result, Start, environment

PAGE = (ROOT / "docs" / "own-model.md").read_text()


def of_the_page() -> tuple[str, str, list[str]]:
    """Where the model is to be saved, its code, and the commands after it."""
    (place,) = re.findall(r"Save this as `~/([\w/.]+)`", PAGE)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (lines,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    return place, code, lines.splitlines()


def test_the_own_model_of_the_documents_runs_as_it_says(forge: Start, tmp_path: Path) -> None:
    """The first run as a user types it; the others by its words alone, which takes half as long."""
    place, code, commands = of_the_page()
    first, *others = [c for c in commands if c.startswith("bash run.sh")]
    model = tmp_path / place
    model.parent.mkdir(parents=True)
    model.write_text(code)
    home = environment(HOME=str(tmp_path), JOBKIT_LOGS=str(tmp_path / "logs"))
    home["JOBKIT_DATA_DIR"] = str(tmp_path / "data")
    typed = [c for c in commands if c not in others]
    done = subprocess.run(
        ["bash", "-e"], input="\n".join(typed), env=home, cwd=ROOT, capture_output=True, text=True,
        timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    runs, words = [], ["bash", "run.sh", "--nproc-per-node", "2"]
    for command in others:
        assert command.split()[: len(words)] == words
        runs.append(forge(2, *command.split()[len(words) :], cwd=str(model.parent)))
        assert runs[-1].codes == [0, 0], runs[-1].out
    strategies = [re.findall(r"--strategy (\w+)", c)[0] for c in (first, *others)]
    assert strategies == ["ddp", "fsdp", "pp"]
    (folder,) = (tmp_path / "logs" / "single").iterdir()
    runs.insert(0, Result([0], done.stdout, RunPaths(folder)))
    losses = [[r["train_loss"] for r in run.records("epoch")] for run in runs]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][1] < losses[0][0]
    ddp, fsdp, pp = (run.out for run in runs)
    assert "patches:PatchTransformer: 207,946 parameters" in ddp  # of jobkit memory
    assert "  blocks.3: 49,984, here 24,992" in fsdp  # sharded by class
    assert "pp: 2 stages on 2 ranks" in pp
    (second,) = re.findall(r"^  stage 1, rank 1: (\S+)", pp, re.MULTILINE)
    assert second.startswith("blocks.2.")
