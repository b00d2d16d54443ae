"""A drill's parts, without a run: what is said of a run's files, lanes, the table, bad words."""

import csv
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jobkit.drill import cli
from jobkit.drill import faults as drill_faults
from jobkit.drill import slurm as drill_slurm
from jobkit.drill.fault import FaultCase
from jobkit.drill.fault_run import FaultRun, Lost
from jobkit.drill.faults import FAULTS, NODE_FAULTS, WIDE
from jobkit.drill.lanes import lane_options
from jobkit.drill.place import MARK, LocalPlace, Started, end_marked, marked, none_left
from jobkit.drill.possible import impossible
from jobkit.drill.program import Training
from jobkit.drill.row import Row, first_attempt, lost_iterations, startup, with_parameters
from jobkit.drill.slurm import SlurmPlace, SlurmStart
from jobkit.drill.table import listing, show, write_csv
from jobkit.errors import UsageError
from jobkit.launch.site import Site
from jobkit.launch.slurm.minicluster import Minicluster
from jobkit.metric.line import MetricWriter
from jobkit.outcome.status import run_state
from jobkit.paths import RunPaths, write_json

GOOD = Row(
    fault="kill", where="n1,n2", first_status="failed", evidence="task 1: Killed",
    final_status="ok",
    attempts=2, detected_s=1.25, restart_s=6.5, iterations_lost=5, same_parameters=True, orphans=0,
)  # fmt: skip


def write(paths: RunPaths, attempt: int, *records: tuple[str, dict]) -> None:
    """Leave these records in an attempt's metrics file."""
    paths.metrics_folder.mkdir(parents=True, exist_ok=True)
    (paths.attempts / str(attempt)).mkdir(parents=True)
    with (paths.folder / "log").open("w") as log:
        writer = MetricWriter(
            study="drill", run_id=paths.folder.name, attempt=attempt, rank=0,
            path=paths.metrics(attempt), log=log,
        )  # fmt: skip
        for kind, fields in records:
            writer.write(kind, **fields)
        writer.close()


def saved(iteration: int) -> tuple[str, dict]:
    return ("checkpoint", {"action": "saved", "iteration": iteration})


def loaded(iteration: int) -> tuple[str, dict]:
    return ("checkpoint", {"action": "loaded", "iteration": iteration})


@pytest.mark.parametrize(
    ("first", "then", "lost"),
    [
        ([saved(10), saved(20)], [loaded(20)], 5),
        ([saved(10), saved(20), saved(26)], [loaded(26)], 0),
        ([saved(10), saved(20)], [("checkpoint", {"action": "rejected", "iteration": 20}),
                                  loaded(10)], 15),
        ([], [], 25),
    ],
)  # fmt: skip
def test_iterations_lost_are_those_done_again(tmp_path: Path, first, then, lost: int) -> None:
    paths = RunPaths(tmp_path / "kill")
    write(paths, 0, *first)
    assert lost_iterations(paths, 25) == 0  # there was no other attempt
    write(paths, 1, ("startup", {"total_s": 3.0}), *then)
    assert lost_iterations(paths, 25) == lost
    assert time.time() - 60 < (startup(paths, 1) or 0) < time.time() + 1


def test_the_first_attempt_is_told_as_if_there_had_been_no_other(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "kill")
    write(paths, 0, saved(20))
    write(paths, 1, ("run_end", {"status": "ok", "reason": ""}))
    paths.log.write_text(
        "[jobkit] start: attempt 0 of kill on n1\nsrun: error: n2: task 1: Killed\n"
        "[jobkit] start: attempt 1 of kill on n1\ndone\n"
    )
    assert run_state(paths).status == "ok"
    state = run_state(first_attempt(paths, None))
    assert (state.status, state.evidence, state.attempts) == (
        "failed", "srun: error: n2: task 1: Killed", 1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({}, True),
        ({"orphans": None}, True),  # not seen from here
        ({"final_status": "failed"}, False),
        ({"note": "it ended before the fault"}, False),
        ({"same_parameters": False}, False),
        ({"same_parameters": None}, True),  # of a command they are not compared
        ({"orphans": 1}, False),
        ({"where": "", "final_status": ""}, True),  # not possible here
    ],
)
def test_what_is_good(changed: dict, good: bool) -> None:
    assert replace(GOOD, **changed).good is good


def test_the_table_and_the_csv_have_every_row(tmp_path: Path) -> None:
    rows = [GOOD, Row(fault="link", note="not possible here: no links"), Row(fault="x", where="h")]
    write_csv(rows, tmp_path / "cli.csv")
    with (tmp_path / "cli.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["fault"] for row in found] == ["kill", "link", "x"]
    assert found[0]["detected_s"] == "1.250" and found[0]["same_parameters"] == "yes"
    assert found[1]["orphans"] == "" and found[1]["note"].endswith("no links")
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    show(rows, console)
    text = console.export_text()
    assert "kill   failed" in text and "1.2 s" in text and "6.5 s" in text and "yes" in text
    assert "link: not possible here: no links" in text


def test_the_parameters_are_those_of_the_rows_own_folder(tmp_path: Path) -> None:
    (row,) = with_parameters([GOOD], {f"{tmp_path}/kill": False}, tmp_path)
    assert row.same_parameters is False and not row.good
    rows = [GOOD, replace(GOOD, note="lost"), Row(fault="link", note="not possible here")]
    notes = [row.note for row in with_parameters(rows, {}, tmp_path)]
    assert notes == ["its parameters could not be compared", "lost", "not possible here"]


# --- places and lanes -----------------------------------------------------------------------------


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SlurmPlace:
    """A place on a minicluster of four nodes, none of which is there."""
    monkeypatch.setenv("JOBKIT_MINICLUSTER_DIR", str(tmp_path))
    answer = subprocess.CompletedProcess([], 0, "batch\nurgent\n", "")
    monkeypatch.setattr(drill_slurm, "slurm", lambda *_, **__: answer)
    sized(tmp_path, 4)
    return SlurmPlace(Site(name="mini"), {}, None)


def sized(folder: Path, nodes: int) -> None:
    write_json(folder / "minicluster.json", {"options": {"nodes": nodes}})


@pytest.mark.parametrize("nodes", [4, WIDE])
def test_what_hits_a_node_is_away_from_the_other_runs(
    mini: SlurmPlace, tmp_path: Path, nodes: int
) -> None:
    sized(tmp_path, nodes)
    names = [f"n{i}" for i in range(1, nodes + 1)]

    def nodes_of(fault: FaultCase) -> list[str]:
        away = str(lane_options(mini, fault)["exclude"]).split(",")
        return [name for name in names if name not in away]

    assert nodes_of(FAULTS["kill"]) == nodes_of(FAULTS["slurmctld"]) == ["n1", "n2"]
    taken: list[str] = []
    for name in NODE_FAULTS:
        fault, own = FAULTS[name], nodes_of(FAULTS[name])
        size = 1 if fault.one_node else 2
        spare = 0 if fault.needs == "urgent" else 1  # a node to go on at
        assert len(own) >= size + spare
        assert not {"n1", "n2"} & set(own[size - 1 :]), "another run's node may be hit"
        taken += own
    if nodes == WIDE:
        assert len(taken) == len(set(taken)) and "n1" not in taken and "n2" not in taken
    assert lane_options(LocalPlace(), FAULTS["kill"]) == {}
    assert mini.urgent == "urgent" and all(
        fault.lane in ("shared", "slow", "nodes", "alone") for fault in FAULTS.values()
    )


def test_why_a_fault_is_not_possible(mini: SlurmPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    here = LocalPlace()
    assert impossible(here, FAULTS["scancel"]) == "it needs Slurm"
    assert impossible(here, FAULTS["kill"]) == ""
    assert impossible(mini, FAULTS["node"]) == ""
    assert "--netns" in impossible(mini, FAULTS["link"])
    assert "root" in impossible(mini, FAULTS["disk-full"])
    mini.urgent = None
    assert "--urgent-partition" in impossible(mini, FAULTS["preemption"])
    mini.cluster = None
    assert "--minicluster" in impossible(mini, FAULTS["slurmd"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in impossible(here, FAULTS["disk-full"])


def test_the_job_that_preempts_is_charged_as_the_others(
    mini: SlurmPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    answer = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(drill_slurm, "slurm", lambda words: called.append(words) or answer)
    mini.site = Site(name="s", account="of-the-site", qos="high")
    assert mini.preempt(["n1"]) == ""
    mini.options = {"account": "given"}
    assert mini.preempt(["n1"]) == ""
    charged = [[w for w in words if w.startswith(("--account", "--qos"))] for words in called]
    assert charged == [["--account=of-the-site", "--qos=high"], ["--account=given", "--qos=high"]]


def shown(state: str, restarts: int = 0) -> str:
    return f"JobId=7 JobState={state} Restarts={restarts} ExitCode=0:0 NodeList=n[1-2]\n"


def test_a_jobs_starts_and_ends_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        *(shown("PENDING"), shown("RUNNING"), ""),  # the controller is away for a moment
        *(shown("RUNNING"), shown("PREEMPTED"), shown("PENDING")),
        *(shown("RUNNING", 1), shown("COMPLETING", 1), shown("COMPLETED", 1)),
    ]

    def answer(words: list[str], **_: str) -> "subprocess.CompletedProcess[str]":
        text = "n1\nn2\n" if "hostnames" in words else answers.pop(0)
        return subprocess.CompletedProcess(words, 0, text, "")

    monkeypatch.setattr(drill_slurm, "slurm", answer)
    job, looks = SlurmStart(job_id="7"), 0
    while job.look():
        looks += 1
    assert looks == 8 and not answers
    assert (len(job.begins), len(job.ends), job.nodes) == (2, 2, ["n1", "n2"])
    assert job.begins[0] <= job.ends[0] <= job.begins[1] <= job.ends[1]
    assert job.said == "Slurm job 7: COMPLETED"


def test_a_job_that_slurm_has_forgotten_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sites' controllers forget a job seconds after its end."""
    unknown = "slurm_load_jobs error: Invalid job id specified\n"
    answers = [
        (0, shown("RUNNING"), ""),
        (0, "n1\nn2\n", ""),
        (1, "", "timed out"),
        (1, "", unknown),
    ]
    monkeypatch.setattr(
        drill_slurm, "slurm", lambda words: subprocess.CompletedProcess(words, *answers.pop(0))
    )
    job = SlurmStart(job_id="7")
    assert [job.look() for _ in range(3)] == [True, True, False]
    assert job.over and len(job.ends) == 1
    assert job.said == "Slurm job 7: job not found"


def test_processes_are_found_by_their_mark() -> None:
    env = {**os.environ, MARK: "test-mark"}
    child = subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE)
    try:
        assert marked("test-mark") == [child.pid] and marked("test-mar") == []
        assert none_left("test-mark", 0.0) == 1
    finally:
        end_marked("test-mark")
    assert child.wait(100) == -9
    assert none_left("test-mark", 5.0) == 0


# --- what is done to files ------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> FaultRun:
    paths = RunPaths(tmp_path / "x")
    for name, content in (("00000010-0", b"older"), ("00000020-0", b"0123456789")):
        (paths.checkpoints / name).mkdir(parents=True)
        (paths.checkpoints / name / "__0_0.distcp").write_bytes(content)
        (paths.checkpoints / name / "manifest.json").write_bytes(b"{}" * 20)
    return FaultRun(
        fault=FAULTS["kill"], place=LocalPlace(), paths=paths, program=Training(25, "cpu"),
        mark="m", say=print, halted=threading.Event(),
    )  # fmt: skip


def test_only_the_newest_checkpoint_is_damaged(run: FaultRun) -> None:
    newest = run.paths.checkpoints / "00000020-0" / "__0_0.distcp"
    drill_faults._flip_bit(run)
    assert [a ^ b for a, b in zip(newest.read_bytes(), b"0123456789", strict=True)] == [
        0, 0, 0, 0, 0, 16, 0, 0, 0, 0,
    ]  # fmt: skip
    drill_faults._truncate(run)
    assert len(newest.read_bytes()) == 5
    assert (run.paths.checkpoints / "00000010-0" / "__0_0.distcp").read_bytes() == b"older"


def test_a_wait_ends_with_its_reason_or_with_the_drill(run: FaultRun) -> None:
    run.patience_s = 0.01
    with pytest.raises(Lost, match="the moon: not reached within"):
        run.wait("the moon", lambda: False)
    run.halted.set()
    with pytest.raises(Exception) as ended:
        run.wait("the moon", lambda: False)
    assert type(ended.value).__name__ == "Halted"


def test_a_fault_that_cannot_be_mended_is_a_row_like_any_other(
    run: FaultRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error from outside ends neither the drill nor what is to be put right after it."""

    def refused(*_: object) -> None:
        raise UsageError("minicluster: error: the link is busy")

    def begun(run: FaultRun, *_: object) -> None:
        run.starts.append(Started(over=True, begins=[1.0], ends=[2.0]))
        raise OSError("no room")

    run.fault = replace(FAULTS["kill"], after=refused)
    run.paths = RunPaths(run.paths.folder / "another")
    monkeypatch.setattr(FaultRun, "_start", begun)
    row = run.run()
    assert row.note == "no room; minicluster: error: the link is busy"
    assert row.possible and not row.good


# --- the command ----------------------------------------------------------------------------------


def test_the_list_names_every_fault_and_what_it_needs(capsys) -> None:
    assert cli.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert text == listing() + "\n"
    assert [line.split()[0] for line in text.splitlines()] == list(FAULTS)
    assert "needs Slurm" in text and "needs a minicluster with --netns" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--faults", "kil"], "did you mean 'kill'"),
        (["--at", "61"], "must be from 21 to 60"),
        (["--after", "3"], "--after is for a command, which comes after --"),
        (["--"], "-- needs a command after it"),
        (["--at", "0", "--", "python", "train.py"], "--at 0: must be 1 or more"),
        (["--after", "400", "--", "python", "train.py"], "must be below --patience 400"),
        (["--device", "cpu", "--", "python", "train.py"], "a command decides itself"),
        (["--at", "5", "--after", "9", "--", "python", "train.py"], "give one of them"),
        (["-A", "project"], "--account: is for Slurm, but the runs start on this machine"),
        (["--urgent-partition", "high"], "--urgent-partition: is for Slurm"),
        (["--faults", "scancel", "node"], "no fault can be injected here: scancel: it needs Slurm"),
        (["--name", "../x"], "use letters, digits"),
        (["--name", "study"], "is a study; choose another"),
        (["--name", "mine"], "holds other files (notes)"),
    ],
)
def test_bad_words_are_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path))
    for name, file in (("study", "plan.json"), ("mine", "notes")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    assert cli.main(["--local", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert (tmp_path / "mine" / "notes").exists()


def test_a_fault_knows_its_true_statuses_and_its_kind() -> None:
    from jobkit.outcome.status import STATUSES

    for fault in FAULTS.values():
        assert fault.first and set(fault.first) <= set(STATUSES)
        assert fault.kind in ("hold", "kill", "raise", "hang")
        # A rank that pauses needs a fault from outside.
        assert (fault.kind == "hold") == (fault.inject is not None)
    assert isinstance(FAULTS["kill"], FaultCase) and isinstance(Minicluster("x"), Minicluster)


@pytest.mark.parametrize("words", [["--faults", "slurmd", "node"], ["-p", "gpu"]])
def test_a_refused_call_leaves_what_an_earlier_drill_made(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path))
    (tmp_path / "drill" / "kill").mkdir(parents=True)
    (tmp_path / "drill" / "drill.csv").write_text("fault\n")
    assert cli.main(["--site", "local", *words]) == 2
    assert sorted(p.name for p in (tmp_path / "drill").iterdir()) == ["drill.csv", "kill"]
