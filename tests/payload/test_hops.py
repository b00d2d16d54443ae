"""How many files of the source a reader opens to follow a training step, a save, a resume.

Counted by sys.setprofile on rank 0 of two. Records are written by report.py and what it uses; in a
save and a resume these files are not counted.
"""

import json
from pathlib import Path

from support.cuts import DATA
from support.rigs import NO_BREAKDOWN, Start

MAX_FILES = {"iteration": 7, "save": 5, "resume": 5}
RECORDS = {"payload/report.py", "metric/kinds.py", "program/lines.py", "entry.py"}  # its output
COUNTING = """
import json, os, sys
from pathlib import Path
import jobkit
from own_models import plain

SOURCE = str(Path(jobkit.__file__).parent) + "/"
PHASES = {("payload/checkpoint.py", "save"): "save", ("payload/resume.py", "resume"): "resume"}
files, active, edges = {}, set(), 0

def follow(frame, event, _):
    global edges
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(SOURCE):
        return
    name = code.co_filename[len(SOURCE):]
    phase = PHASES.get((name, code.co_name))
    if event == "call" and phase:
        active.add(phase)
    for each in active:
        files.setdefault(each, set()).add(name)
    if event == "return" and phase:
        active.discard(phase)
    if event == "return" and (name, code.co_name) == ("payload/stop.py", "edge"):
        edges += 1
        active.add("iteration") if edges == 3 else active.discard("iteration")
    if event == "return" and not active and os.environ["RANK"] == "0":
        found = {each: sorted(names) for each, names in files.items()}
        Path("found.json").write_text(json.dumps(found))

def counted():
    sys.setprofile(follow)
    return plain()
"""


def test_few_files_are_to_be_read(forge: Start, own: Path) -> None:
    (own / "counting.py").write_text(COUNTING)
    words = (*DATA, "--epochs", "1", "--global-batch-size", "8", *NO_BREAKDOWN, "--strategy", "ddp")
    words += ("--model", "counting:counted", "--checkpoint-every", "6")
    found = {}
    for attempt in ("0", "1"):
        fault = {"JOBKIT_FAULT": "raise@7:0:0"}
        done = forge(
            2, *words, "--attempt", attempt, run_dir=own / "run", cwd=own, env=fault, code=None
        )
        found |= json.loads((own / "found.json").read_text())
    assert done.codes == [0, 0], done.out
    for phase, names in found.items():
        counted = {*names} - (RECORDS if phase != "iteration" else set())
        assert len(counted) <= MAX_FILES[phase], (phase, sorted(counted))
    assert found.keys() == MAX_FILES.keys()
