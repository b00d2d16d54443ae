"""The line that tells why a job ended, among all the lines that only look like it."""

from hypothesis import given
from hypothesis import strategies as st

from jobkit import files
from jobkit.files import read_tail
from jobkit.outcome.evidence import START_MARK, clean, find_sign, of_newest, with_hint

HEAD = "Traceback (most recent call last):"
EPOCH = '[METRIC] {"v":1,"kind":"epoch","attempt":0}'


def reason(*lines: str) -> str:
    sign = find_sign([*lines])
    return sign.reason if sign else ""


def of_rank(rank: int, error: str, prefix: str = "[rank{}]: ") -> tuple[str, ...]:
    return tuple(prefix.format(rank) + text for text in (HEAD, "  File 'x'", error))


SETUP = "setup command failed: module load cuda/12"
EXITED = "srun: error: n1: task 0: Exited with exit code 1"


def test_the_reason_that_lines_give() -> None:
    chain = "During handling of the above exception, another exception occurred:"
    echo = of_rank(0, "RuntimeError: Connection reset by peer")
    cause = of_rank(1, "ValueError: boom")
    for lines, expected in [
        *[(of_rank(3, "ValueError: boom", prefix), "rank 3: ValueError: boom")
          for prefix in ("[rank{}]: ", "[rank{}] ", "{}: ")],
        ((f"[rank1]: {HEAD}", f"[rank0]: {HEAD}", "[rank0]:   File 'x'", "[rank1]:   File 'y'",
          "[rank1]: ValueError: one", "[rank0]: KeyError: 'zero'"), "rank 1: ValueError: one"),
        (echo, "rank 0: RuntimeError: Connection reset by peer"),
        *[(lines, "rank 1: ValueError: boom") for lines in (echo + cause, cause + echo)],
        ((HEAD, "  File 'x'", "KeyError: 'a'", "", chain, "", HEAD, "  File", "ValueError: b"),
         "ValueError: b"),
        ((f"\x1b[31m{HEAD}\x1b[0m\r", "  File 'x'\r", "\x1b[1mValueError: boom\x1b[0m\r"),
         "ValueError: boom"),
        (('[METRIC] {"kind":"message","text":"CUDA out of memory"}',), ""),
        (("usage: t.py [-h]", "t.py: error: unrecognized arguments: --bs 3"),
         "wrong usage: t.py: error: unrecognized arguments: --bs 3"),
        (("Lmod has detected the following error", f"jobkit: error: site x: {SETUP}", EXITED),
         f"did not start: jobkit: error: site x: {SETUP}"),
        (("everything is fine", "epoch 3/5: loss 0.1"), ""),
    ]:  # fmt: skip
        assert reason(*lines) == expected


def test_the_status_that_a_line_gives() -> None:
    job = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00"
    for line, status in (
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "oom"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0", "oom"),
        (f"{job.replace('JOB', 'STEP')} DUE TO TIME LIMIT ***", "timeout"),
        (f"{job} DUE TO PREEMPTION ***", "preempted"),
        (f"{job} DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***", "node_fail"),
        (f"{job} ***", "cancelled"),
        ("srun: error: n1: task 3: Segmentation fault", "failed"),
    ):
        sign = find_sign([line, EXITED])
        assert sign and (sign.status, sign.text) == (status, line)


def test_what_srun_kills_after_a_timeout_is_no_cause() -> None:
    killed = "srun: error: n2: task 1: Killed"
    hang = of_rank(0, "RuntimeError: Timed out waiting 60000ms for recv operation to complete")
    assert "Timed out" in reason(*hang, EXITED, killed)
    assert "Killed" in reason(killed, *hang, EXITED)
    lost = of_rank(0, "RuntimeError: Connection closed by peer")
    assert "Killed" in reason(*lost, EXITED, killed)  # whichever srun hears of first


def test_a_fault_that_training_survived_was_no_end() -> None:
    handled = (HEAD, "  File", "TimeoutError: timed out", EPOCH, EPOCH)
    killed = "srun: error: n1: task 0: Killed"
    assert reason(*handled) == "" and "Killed" in reason(*handled, EXITED, killed)
    assert "timed out" in reason(*handled[:4]) and "timed out" in reason(*handled[:4], killed)
    assert "oom_kill" in reason("slurmstepd: error: Detected 1 oom_kill event", EPOCH, EPOCH)
    ignored = "Exception ignored in: <function Iter.__del__ at 0x7f>"
    assert reason(ignored, HEAD, "  File", "AssertionError: can only test a child process") == ""
    assert "boom" in reason(f"1: {ignored}", *of_rank(0, "ValueError: boom", "{}: "))


def test_only_the_newest_start_counts() -> None:
    first = (f"{START_MARK} 0", "CUDA out of memory", EPOCH, "late words of the first")
    assert find_sign(of_newest([*first, f"{START_MARK} 1", "fine"], 1)) is None
    assert find_sign(of_newest([EPOCH, "CUDA out of memory"], 0)) is not None
    assert find_sign(of_newest(["CUDA out of memory", EPOCH], 1)) is None


def test_a_common_error_has_one_hint() -> None:
    for reason, text, hint in [
        ("rank 0: ModuleNotFoundError: No module named 'x'", "", "install it for the Python"),
        ("ended with exit code 2", "python: can't open file '/a/t.py': [Errno 2]", "a path begins"),
        ("rank 0: ValueError: ProcessGroupNCCL is only supported with GPUs", "", "no GPU here"),
        ("ended with exit code 127", "bash: line 1: trian: command not found", "not in PATH"),
        ("Slurm job 7: TIMEOUT, after 00:30:00", "", "a longer --time"),
        ("rank 0: ValueError: boom", "ValueError: boom", ""),
    ]:
        shown = with_hint(reason, text)
        assert shown.startswith(reason) and hint in shown and (hint or shown == reason)
        assert shown.count("(") <= reason.count("(") + 1


@given(st.binary(max_size=3000), st.integers(1, 500))
def test_a_tail_is_the_end_of_the_file(tmp_path_factory, data, size) -> None:
    path = tmp_path_factory.mktemp("tail") / "train.log"
    path.write_bytes(data)
    lines = data.decode("utf-8", "replace").split("\n")
    shown = read_tail(path, size)
    assert shown == lines[len(lines) - len(shown) :] or not data
    assert size < len(data) or shown == lines or not data


def test_of_very_many_lines_the_last_are_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "_MAX_TAIL_LINES", 2)
    (tmp_path / "train.log").write_text("a\nb\nc\nd")
    assert read_tail(tmp_path / "train.log") == ["c", "d"]
    assert read_tail(tmp_path / "train.log", 3) == ["d"]


@given(st.text(max_size=2000))
def test_evidence_is_one_short_line(text: str) -> None:
    shown = clean(text)
    assert len(shown) <= 500 and len(shown.splitlines()) <= 1 and clean(shown) == shown
