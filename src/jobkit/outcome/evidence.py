"""The line of a job's log that shows why it ended: tracebacks, Slurm messages, memory, signals."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jobkit.errors import ANSI, one_line

_SHOWN = 500  # characters of a line that are kept as evidence

START_MARK = "[jobkit] start"  # run.sh prints a line that begins so at each start
_EPOCH = re.compile(r'\[METRIC\].*"kind":"epoch"')
_ATTEMPT = re.compile(r'\[METRIC\].*"attempt":([0-9]{1,9})\b')
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::\s|:?$)")
_IGNORED = "Exception ignored"  # by Python, in a finaliser
_CHAINED = re.compile(r"^(?:During handling of the above|The above exception was the direct)")
_RANK = re.compile(r"rank\s*[:=]?\s*([0-9]{1,7})|^\s*([0-9]{1,7}):\s", re.IGNORECASE)

# How much a sign says about the cause. The strongest sign wins; of equals, the first in time.
_CAUSE, _MEMORY_TEXT, _KILLED, _ECHO, _LAST_RESORT = 5, 4, 3, 2, 1

_OOM = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory|OutOfMemoryError|^MemoryError\b"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough)|std::bad_alloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Cannot allocate memory"
)
_ENDS_BY_SIGNAL = "(?:Killed|Segmentation fault|Aborted|Bus error|Floating point exception)"
_LINES: tuple[tuple[int, str, str, re.Pattern[str]], ...] = tuple(
    (strength, status, reason, re.compile(pattern))
    for strength, status, reason, pattern in (
        (_CAUSE, "timeout", "time limit reached", r"CANCELLED AT .* DUE TO TIME LIMIT"),
        (_CAUSE, "preempted", "preempted", r"CANCELLED AT .* DUE TO (?:PREEMPTION|JOB REQUEUE)"),
        (_CAUSE, "node_fail", "a node failed", r"DUE TO NODE FAILURE|srun: error: Node failure on"),
        (_CAUSE, "cancelled", "cancelled", r"\*\*\* JOB \S+ ON \S+ CANCELLED AT"),
        (_CAUSE, "oom", "out of memory", r"(?i:oom[-_]kill)|tasks? [\d,-]+: Out Of Memory"),
        (_CAUSE, "oom", "out of memory", r"memory limit .*being killed|[Oo]ut of memory: Killed"),
        (_MEMORY_TEXT, "oom", "out of memory", _OOM.pattern),
        (_KILLED, "failed", "killed", rf"srun: error: .*: tasks? [\d,-]+: {_ENDS_BY_SIGNAL}"),
        (_KILLED, "failed", "killed", r"Signal \d+ \(SIG(?:KILL|SEGV|ABRT|BUS|FPE|ILL)\) received"),
        (_ECHO, "failed", "a task failed", r"srun: error: .*: tasks? [\d,-]+: Exited with exit"),
        (_MEMORY_TEXT, "failed", "wrong usage", r"^(?:\[?rank ?\d+\]?: )?[\w.-]+\.py: error: "),
        (_KILLED, "failed", "did not start", r"^jobkit: error: "),  # a set-up line of its site
        (_LAST_RESORT, "cancelled", "cancelled", r"\*\*\* STEP \S+ ON \S+ CANCELLED AT"),
    )
)
# An exception caused by another rank's death or a request from outside: not the cause.
_ECHOES = re.compile(
    r"[Cc]onnection (?:closed by peer|reset by peer|was likely closed)"
    r"|remote process (?:exited|has)|Broken pipe|Socket closed|Socket Timeout"
    r"|Timed out waiting \d+|[Ww]atchdog caught|failed to recv|peer.*(?:closed|exited)"
    r"|NCCL communicator was aborted"
)
# What mends a common error of a program, by the line that shows it; the first that fits.
_HINTS = {
    "ProcessGroupNCCL is only supported with GPUs": "no GPU here: use backend gloo, or ask for "
    "GPUs",
    "ModuleNotFoundError: No module named": "install it for the Python that runs the program",
    "can't open file|FileNotFoundError": "a path begins in the folder in which the study was "
    "launched",
    ": command not found|exit code 127": "the program is not in PATH where the job runs",
    "exit code 126": "make the program executable: chmod u+x",
    "DUE TO TIME LIMIT|: TIMEOUT": "a longer --time; jobkit's training has --checkpoint-every N",
    "Address already in use": "another job of this node has the port: set MASTER_PORT",
}


@dataclass(frozen=True)
class Sign:
    """One line of a log that says how the run ended."""

    strength: int
    status: str
    reason: str
    text: str
    of_scheduler: bool = False  # Slurm said it


def clean(text: str) -> str:
    """A log's line as one line of plain text, not too long."""
    plain = one_line(text)
    return plain if len(plain) <= _SHOWN else plain[: _SHOWN - 4] + " ..."


def with_hint(reason: str, text: str) -> str:
    """The reason of an end, with what mends it where its line of evidence shows that."""
    hints = (hint for line, hint in _HINTS.items() if re.search(line, f"{reason} {text}"))
    return next((f"{reason} ({hint})" for hint in hints), reason)


def of_newest(lines: list[str], attempt: int | None) -> list[str]:
    """Those of the last lines that belong to the newest start, as far as the log tells.

    It begins at the last line with START_MARK, or after the last record of an earlier attempt.
    """
    begin = 0
    for index, text in enumerate(lines):
        match = _ATTEMPT.search(text)
        if match and attempt is not None and int(match[1]) < attempt:
            begin = index + 1
        elif text.startswith(START_MARK):
            begin = index
    return lines[begin:]


def find_sign(lines: list[str], went_on_to: int = 0) -> Sign | None:
    """The line that best explains why the run ended: the strongest sign, the first of equals.

    What training went on after (went_on_to: a line) was no end, but for Slurm's word.
    """
    return max(_signs(lines, went_on_to), key=lambda sign: sign.strength, default=None)


def _signs(lines: list[str], went_on_to: int) -> Iterator[Sign]:
    texts = [ANSI.sub("", text).rstrip("\r") for text in lines]
    epochs = [index for index, text in enumerate(lines) if _EPOCH.search(text)]
    # The last one may have been under way on rank 0 as another rank fell.
    went_on_to = max(went_on_to, *epochs[-2:-1], 0)
    skip: set[int] = set()
    timed_out = False  # then srun kills those for which the others have waited
    for index, text in enumerate(lines):
        if index in skip or "[METRIC]" in text:
            continue
        if _TRACEBACK in text:
            prefix, body, end = _exception(texts, index, skip)
            before = (x for x in texts[max(0, index - 99) : index][::-1] if x.startswith(prefix))
            if end < went_on_to or next(before, "").startswith(prefix + _IGNORED):
                continue
            timed_out = timed_out or "imed out" in body or "timeout" in body
            yield _judge(prefix, body, clean(texts[end]))
        elif row := next((row for row in _LINES if row[3].search(text)), None):
            strength, status, reason, _ = row
            if index < went_on_to and strength != _CAUSE:
                continue
            if reason == "killed" and timed_out:
                strength = _ECHO
            shown = clean(text)
            yield Sign(strength, status, f"{reason}: {shown}", shown, strength == _CAUSE)


def _exception(texts: list[str], begin: int, skip: set[int]) -> tuple[str, str, int]:
    """The exception that ends the traceback at a line: the prefix of its rank, its text, its index.

    The lines of several ranks may be mixed: those of this traceback have the same prefix, such as
    "[rank1]: ", as its first line, or none; they are added to skip. Of a chain the last counts.
    """
    shown_prefix = prefix = texts[begin].split(_TRACEBACK)[0]
    after = texts[begin + 1] if begin + 1 < len(texts) else ""
    if prefix and not after.startswith(prefix) and after.startswith("  "):
        prefix = ""  # a logger's prefix stands on the first line only
    end, within, chained = begin, True, False
    for index in range(begin + 1, min(len(texts), begin + 5000)):
        if not texts[index].startswith(prefix):
            continue
        body = texts[index][len(prefix) :]
        if within:
            skip.add(index)
            if not body.startswith((" ", "|", "+")) and _EXCEPTION.match(body):
                end, within, chained = index, False, False
        elif _CHAINED.search(body):
            skip.add(index)
            chained = True
        elif _TRACEBACK in body and chained:
            skip.add(index)
            within = True
        elif _TRACEBACK in body or not (prefix or chained or not body.strip() or body[0] == " "):
            break
    return shown_prefix, texts[end].removeprefix(prefix), end


def judge(reason: str) -> Sign:
    """What a payload's own reason, "rank 1: ValueError: ..." for one, says of the cause."""
    rank = re.match(r"rank [0-9]{1,7}: ", reason)
    prefix = rank[0] if rank else ""
    return _judge(prefix, reason[len(prefix) :], clean(reason))


def _judge(prefix: str, body: str, shown: str) -> Sign:
    """What an exception's line says of the cause."""
    rank = _RANK.search(prefix)
    whose = f"rank {rank[1] or rank[2]}: " if rank else ""
    strength, status = _CAUSE, "failed"
    if _OOM.search(body):
        status = "oom"
    elif re.fullmatch(r"exit code \d+", body):
        strength = _KILLED  # a line of the program says more
    elif body.startswith("KeyboardInterrupt") or "SignalException" in body:
        strength, status = _LAST_RESORT, "cancelled"
    elif "ChildFailedError" in body or _TRACEBACK in body:
        strength = _LAST_RESORT
    elif _ECHOES.search(body):
        strength = _ECHO
    return Sign(strength, status, whose + clean(body), shown)
