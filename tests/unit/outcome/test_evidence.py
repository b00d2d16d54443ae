"""The line that tells why a job ended, among all the lines that only look like it."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from jobkit.outcome.evidence import START_MARK, clean, find_sign, judge, of_newest, went_on
from jobkit.outcome.logs import Tail, read_tail

HEAD = "Traceback (most recent call last):"
EPOCH = '[METRIC] {"v":1,"kind":"epoch","attempt":0}'


def tail(*lines: str) -> Tail:
    return Tail("train.log", list(enumerate(lines, 1)))


def reason(*lines: str) -> str:
    sign = find_sign(tail(*lines))
    return sign.reason if sign else ""


def test_the_ranks_traceback_names_the_rank() -> None:
    for prefix in ("[rank3]: ", "[rank3] ", "3: "):
        lines = (f"{prefix}{HEAD}", f"{prefix}  File 'x'", f"{prefix}ValueError: boom")
        assert reason(*lines) == "rank 3: ValueError: boom"


def test_lines_of_other_ranks_do_not_mix_in() -> None:
    lines = (f"[rank1]: {HEAD}", f"[rank0]: {HEAD}", "[rank0]:   File 'x'", "[rank1]:   File 'y'")
    lines += ("[rank1]: ValueError: one", "[rank0]: KeyError: 'zero'")
    assert reason(*lines) == "rank 1: ValueError: one"


def test_a_chain_of_exceptions_ends_with_the_last() -> None:
    chain = "During handling of the above exception, another exception occurred:"
    lines = (HEAD, "  File 'x'", "KeyError: 'a'", "", chain, "", HEAD, "  File", "ValueError: b")
    assert reason(*lines) == "ValueError: b"


def test_an_echo_is_no_cause_wherever_it_stands() -> None:
    echo = (
        f"[rank0]: {HEAD}",
        "[rank0]:   File",
        "[rank0]: RuntimeError: Connection reset by peer",
    )
    cause = (f"[rank1]: {HEAD}", "[rank1]:   File", "[rank1]: ValueError: boom")
    assert reason(*echo, *cause) == reason(*cause, *echo) == "rank 1: ValueError: boom"
    assert "reset by peer" in reason(*echo)


def test_what_a_record_says_is_no_sign() -> None:
    assert reason('[METRIC] {"kind":"message","text":"CUDA out of memory"}') == ""
    assert reason("everything is fine", "epoch 3/5: loss 0.1") == ""


def test_colours_and_carriage_returns_are_nothing() -> None:
    lines = (f"\x1b[31m{HEAD}\x1b[0m\r", "  File 'x'\r", "\x1b[1mValueError: boom\x1b[0m\r")
    assert reason(*lines) == "ValueError: boom"


def test_a_fault_that_training_survived_was_no_end() -> None:
    lines = (HEAD, "  File", "ValueError: boom", EPOCH, EPOCH)
    sign = find_sign(tail(*lines))
    assert sign is not None
    assert went_on(tail(*lines), sign)
    assert not went_on(tail(*lines[:4]), sign)


def test_only_the_newest_start_counts() -> None:
    first = (f"{START_MARK} 0", "CUDA out of memory", EPOCH, "late words of the first")
    assert find_sign(of_newest(tail(*first, f"{START_MARK} 1", "fine"), 1)) is None
    assert find_sign(of_newest(tail(EPOCH, "CUDA out of memory"), 0)) is not None
    assert find_sign(of_newest(tail("CUDA out of memory", EPOCH), 1)) is None


def test_a_payload_s_own_words_are_judged() -> None:
    assert judge("rank 2: torch.OutOfMemoryError: CUDA out of memory").status == "oom"
    assert judge("rank 2: ValueError: x").reason == "rank 2: ValueError: x"
    echo = judge("rank 0: RuntimeError: Connection closed by peer")
    assert echo.strength < judge("rank 1: KeyError: 1").strength


@given(st.binary(max_size=3000), st.integers(1, 500))
def test_a_tail_is_the_end_of_the_file_with_its_line_numbers(
    tmp_path_factory, data: bytes, size: int
) -> None:
    path: Path = tmp_path_factory.mktemp("tail") / "train.log"
    path.write_bytes(data)
    lines = data.decode("utf-8", "replace").split("\n")
    for number, text in read_tail(path, size).lines:
        assert lines[number - 1] == text


@given(st.text(max_size=2000))
def test_evidence_is_one_short_line(text: str) -> None:
    shown = clean(text)
    assert len(shown) <= 500
    assert len(shown.splitlines()) <= 1
    assert clean(shown) == shown
