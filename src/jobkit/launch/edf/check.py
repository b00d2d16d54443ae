"""Finds mistakes in an EDF, the environment definition file of the CSCS container engine.

Without this a mistake is found when the job starts, after its time in the queue, and some never
are: without its network hook a job is slow, not wrong.
"""

from collections.abc import Mapping
from pathlib import Path

from jobkit.files import load_toml
from jobkit.launch.edf import rules
from jobkit.launch.edf.annotations import check_annotations, check_hooks
from jobkit.launch.edf.report import EdfReport, Host
from jobkit.launch.findings import Finding


def check(text: str, folder: Path, environ: Mapping[str, str], here: bool = True) -> list[Finding]:
    """The findings on the text of an EDF.

    folder: where srun will be called, because relative paths start there (not at the EDF).
    environ: the variables that srun will see. here: False when the jobs run on another machine,
    so that paths are not checked and an undefined variable is only a warning.
    """
    report = EdfReport(Host(folder, environ, here))
    try:
        data = load_toml(text)
    except ValueError as error:
        report.error("", f"not valid TOML: {error}")
        return report.findings
    settings = rules.well_typed(data, report)
    for name, rule in rules.RULES.items():
        if name in settings:
            rule(settings[name], report)
    notes = check_annotations(settings.get("annotations", {}), report)
    if "base_environment" not in data:  # else these may be inherited
        if not data.get("image"):
            report.warn("image", 'missing, so that no container is used: add image = "..."')
        check_hooks(notes, report)
    return list(dict.fromkeys(report.findings))
