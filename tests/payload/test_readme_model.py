"""The README's model of one's own, taken from there and run with the commands that stand there."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from rigs import ROOT, environment

from jobkit.metric import Record

README = (ROOT / "README.md").read_text()


def of_the_readme() -> tuple[str, str, list[str]]:
    """Where the model is to be saved, its code, and the commands after it."""
    section = README.split("\n## Your own model\n")[1].split("\n## ")[0]
    (place,) = re.findall(r"Save this as `~/([\w/.]+)`", section)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    commands = re.findall(r"^    (\S.*)$", section.split("```")[-1], re.MULTILINE)
    return place, code, commands


def records(folder: Path, kind: str) -> list[Record]:
    lines = (folder / "metrics").glob("*.jsonl")
    found = [json.loads(line) for file in lines for line in file.read_text().splitlines()]
    return [r for r in found if r["kind"] == kind]


def test_the_readmes_own_model_runs_as_it_says(tmp_path: Path) -> None:
    place, code, commands = of_the_readme()
    runs = [c for c in commands if c.startswith("bash run.sh")]
    assert [re.findall(r"--strategy (\w+)", c)[0] for c in runs] == ["ddp", "fsdp", "pp"]
    model = tmp_path / place
    model.parent.mkdir(parents=True)
    model.write_text(code)
    home = environment(
        HOME=str(tmp_path),
        JOBKIT_LOGS=str(tmp_path / "logs"),
        JOBKIT_DATA_DIR=str(tmp_path / "data"),
    )
    done = subprocess.run(
        ["bash", "-e"],
        input="\n".join(commands),
        env=home,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folders = sorted((tmp_path / "logs" / "single").iterdir(), key=lambda f: f.name)
    assert len(folders) == 3
    losses = [[r["train_loss"] for r in records(f, "epoch")] for f in folders]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][1] < losses[0][0]
    for line in (
        "patches:PatchTransformer: 207,946 parameters",  # of jobkit memory
        "  blocks.3: 49,984, here 24,992",  # sharded by class
        "pp: 2 stages on 2 ranks",
    ):
        assert line in done.stdout
    (second,) = re.findall(r"^  stage 1, rank 1: (\S+)", done.stdout, re.MULTILINE)
    assert second.startswith("blocks.2.")
