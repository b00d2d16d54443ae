"""What Slurm's commands print, read; and who has the last word on a run."""

from jobkit.outcome import slurm_jobs
from jobkit.outcome.slurm_jobs import Job, read_sacct, read_squeue
from jobkit.outcome.state import RunState, join, merged, run_state
from jobkit.paths import RunPaths, write_json


def test_rows_of_which_the_last_start_counts() -> None:
    text = "17_0|RUNNING|0:12|n1|None\n17_5|PENDING|0:00||JobArrayTaskLimit\n\nodd\n"
    found = read_squeue(text)
    assert sorted(found) == ["17_0", "17_5"]
    assert found["17_0"].status == "running" and found["17_0"].reason == ""
    assert found["17_5"].reason == "JobArrayTaskLimit" and found["17_5"].job_id == "17_5"
    text = "9|REQUEUED|0:0|00:00:05|n1\n9|CANCELLED by 1000|0:0|00:01:00|n[2-3]\n"
    text += "30_[1-2]|PENDING|0:0|00:00:00|None assigned\n"
    found = read_sacct(text)
    assert (found["9"].state, found["9"].status) == ("CANCELLED", "cancelled")
    assert found["9"].node_list == "n[2-3]"
    assert found["30"].status == "pending" and found["30"].node_list == ""


def test_elements_that_never_started_share_a_row(monkeypatch) -> None:
    """As Slurm shows an array of which the rest was cancelled before it started."""
    shown = "37|CANCELLED|0:00||JobArrayTaskLimit\n37_0|CANCELLED|0:06|n1|None\n"
    monkeypatch.setattr(slurm_jobs, "output", lambda c: shown if c[0] == "squeue" else "")
    found = slurm_jobs.ask(["37_0", "37_1", "41", "not an id; rm -rf"])
    assert found.pop("41").state == slurm_jobs.GONE
    told = {i: job.status for i, job in found.items() if job.state != slurm_jobs.GONE}
    assert told == {"37_0": "cancelled", "37_1": "cancelled"}


def test_what_slurm_says_of_a_shared_job_is_of_the_run_at_work(tmp_path) -> None:
    paths = RunPaths(tmp_path / "s" / "a")
    paths.folder.mkdir(parents=True)
    write_json(paths.submission, {"launcher": "slurm", "job_id": "5", "shared": True})
    paths.scheduler_log.write_text("slurmstepd: error: *** CANCELLED AT x DUE TO TIME LIMIT ***\n")
    assert run_state(paths).status == "pending"
    (paths.attempts / "0").mkdir(parents=True)
    assert run_state(paths).status == "timeout"


def test_who_has_the_last_word() -> None:
    for own, state, shared, expected in [
        ("running", None, False, "running"),  # without a word from Slurm the files count
        ("ok", "TIMEOUT", False, "ok"),  # every result was there before the end
        ("failed", "FAILED", False, "failed"),
        ("failed", "RUNNING", False, "running"),  # a requeued job's next attempt
        ("failed", "OUT_OF_MEMORY", False, "oom"),
        ("running", "TIMEOUT", False, "timeout"),
        ("running", "COMPLETED", False, "failed"),
        ("pending", "NODE_FAIL", False, "node_fail"),
        ("pending", "RUNNING", True, "pending"),  # its turn has not come
        ("failed", "TIMEOUT", True, "failed"),  # another run's time ran out
        ("pending", "TIMEOUT", True, "missing"),  # its turn never came
        ("pending", "CANCELLED", True, "cancelled"),
        ("running", "SOMETHING_NEW", False, "running"),
        ("pending", "GONE", False, "missing"),
        ("running", "GONE", False, "failed"),
        ("failed", "GONE", True, "failed"),
    ]:
        job = Job(job_id="1", state=state) if state else None
        assert merged(RunState(status=own, reason="own"), job, shared).status == expected
    # What proves another status is not kept as evidence.
    own = RunState(status="preempted", evidence="SIGTERM after 3", evidence_file="r/outcome.json")
    said = merged(own, Job(job_id="9", state="TIMEOUT"))
    found = (said.status, said.evidence, said.evidence_file)
    assert found == ("timeout", "Slurm job 9: TIMEOUT", "")
    same = merged(own, Job(job_id="9", state="PREEMPTED"))
    assert (same.status, same.evidence) == ("preempted", "SIGTERM after 3")


def test_an_array_is_asked_after_once(monkeypatch) -> None:
    asked: list[str] = []

    def output(command: list[str]) -> str:
        asked.append(command[command.index("-j") + 1])
        rows = [f"17_{i}|RUNNING|0:01|n1|None\n" for i in range(1200)]
        return "".join(rows) * (command[0] == "squeue")

    monkeypatch.setattr(slurm_jobs, "output", output)
    states = {i: job.state for i, job in slurm_jobs.ask(f"17_{i}" for i in range(1201)).items()}
    assert states.pop("17_1200") == slurm_jobs.GONE
    assert {*states.values()} == {"RUNNING"} and asked == ["17", "17"]


def started(folder, **more: str | None) -> RunPaths:
    paths = RunPaths(folder / "single" / "job-17")
    (paths.attempts / "0").mkdir(parents=True)
    write_json(paths.job, {"launcher": "run.sh", "job_id": "17", **more})
    return paths


def test_a_job_is_asked_after_on_its_own_cluster(tmp_path) -> None:
    cancelled = Job(job_id="17", state="CANCELLED")
    for number, (noted, here, status) in enumerate((
        ("alps", "alps", "cancelled"),
        ("alps", "eiger", "running"),  # which has another job 17
        ("alps", None, "running"),  # it may be another one's
        (None, "eiger", "cancelled"),
    )):  # fmt: skip
        runs = {"r": started(tmp_path / str(number), cluster=noted)}
        states, _ = join(runs, (), lambda ids: dict.fromkeys(ids, cancelled), here=lambda h=here: h)
        assert states["r"].status == status


def test_slurms_answer_for_an_earlier_start_does_not_count(tmp_path) -> None:
    """The run is started again while Slurm is asked after its first job."""
    paths = started(tmp_path)

    def ask(_: object) -> dict[str, Job]:
        write_json(paths.job, {"launcher": "run.sh", "job_id": "18"})
        return {"17": Job(job_id="17", state="CANCELLED")}

    states, jobs = join({"r": paths}, (), ask)
    assert states["r"].status == "running" and jobs == {}


def test_the_name_of_the_cluster_and_no_slurm_at_all(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert slurm_jobs.ask(["1"]) == {} and slurm_jobs.cluster() is None
    shown = "CliFilterPlugins        = (null)\nClusterName             = alps\nCommunicationP = x\n"
    monkeypatch.setattr(slurm_jobs, "output", lambda _: shown)
    assert slurm_jobs.cluster() == "alps"
