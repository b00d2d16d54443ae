"""The report of a GPU check, and the one file that holds it with the logs."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobkit.checks.gpu_check.expected import Measure
from jobkit.checks.gpu_check.runner import FAIL, Result
from jobkit.checks.gpu_check.setting import Setting
from jobkit.files import read_regular
from jobkit.paths import write_whole

REPORT = "report.md"
# What is sent back: by the end of the name, so that no pickle, checkpoint or script is among it.
_SENT = (".md", ".json", ".jsonl", ".csv", ".log", ".txt", ".xml")
_NOT_SENT = ("checkpoints", ".submitit", "data", "submission.json", "job.json", "launcher.json")
_MOST_BYTES = 4 << 20


def text_of(setting: Setting, about: Mapping[str, str], results: Sequence[Result]) -> str:
    """Return the report in Markdown: the machine, each part, each number beside its bounds."""
    kind = "rehearsal on the CPU: no number is of a GPU" if setting.rehearsal else "GPU check"
    lines = [f"# {kind}", "", *_table(("what", "value"), list(about.items())), ""]
    rows = [(r.part, r.state, f"{r.took_s:.0f} s of {r.limit_s} s", r.reason) for r in results]
    lines += [*_table(("part", "state", "time", "reason"), rows), ""]
    for result in results:
        if result.measures:
            lines += [f"## {result.part}", ""]
            head = ("number", "value", "unit", "expected", "", "why")
            lines += [*_table(head, [_row(one) for one in result.measures]), ""]
    return "\n".join(lines)


def _row(one: Measure) -> tuple[str, ...]:
    value = "-" if one.value is None else f"{one.value:.4g}"
    return (one.name, value, one.unit, one.expected, one.verdict, one.why)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(_cell(c) for c in row)} |" for row in lines]


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "/")


def write(setting: Setting, about: Mapping[str, str], results: Sequence[Result]) -> Path:
    """Write the report and the archive beside the folder; return the archive."""
    write_whole(setting.folder / REPORT, text_of(setting, about, results))
    archive = setting.folder.with_name(setting.folder.name + ".tar.gz")
    beside = archive.with_name(f".{archive.name}.new")
    with tarfile.open(beside, "w:gz") as tar:
        for path in sent(setting.folder):
            _add(tar, path, f"{setting.folder.name}/{path.relative_to(setting.folder)}")
    beside.replace(archive)
    return archive


def sent(folder: Path) -> list[Path]:
    """Return the files of a check that are sent back."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in _SENT
        and not set(path.relative_to(folder).parts) & set(_NOT_SENT)
        and path.is_file()
        and not path.is_symlink()
    )


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a file's content without its owner; of a long one the end."""
    try:
        content = read_regular(path, 1 << 30)[-_MOST_BYTES:]
    except OSError as error:
        content = f"not read: {error.strerror}\n".encode()
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def is_bad(results: Sequence[Result]) -> bool:
    """Return whether a part failed."""
    return any(result.state == FAIL for result in results)
