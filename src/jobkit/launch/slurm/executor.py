"""submitit's executor for Slurm, with the call of sbatch given to it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit import Job, SlurmExecutor
from submitit.helpers import DelayedSubmission

from jobkit.launch.slurm.options import output_file


class Executor(SlurmExecutor):
    """Makes scripts, pickles and jobs as submitit does, and submits through a given function.

    submitit calls sbatch in this process's environment, where an outer job's variables and
    SBATCH_* would count, and submits an array through a plain SlurmExecutor. Nothing public
    changes either, so this class implements `_internal_process_submissions`, the one method that
    submitit's Executor leaves to each kind of executor. The script's text is submitit's own.
    """

    def __init__(
        self, folder: Path, parameters: Mapping[str, Any], sbatch: Callable[[str], str]
    ) -> None:
        """sbatch: submits the text of a script and returns the job's id."""
        super().__init__(folder)
        self.update_parameters(**parameters)
        self._sbatch = sbatch

    @classmethod
    def affinity(cls) -> int:
        """Always available: a dry run makes scripts on machines without Slurm."""
        return 2

    def script(self, count: int) -> str:
        """The batch script of a number of calls, an array where there are several."""
        self.parameters.pop("map_count", None)
        if count > 1:
            self.parameters["map_count"] = count
        if "%" in str(self.folder):  # submitit would leave it to Slurm, as a pattern
            name = "%A_%a_0_log.out" if count > 1 else "%j_0_log.out"
            own = {"output": f"{output_file(self.folder)}/{name}"}
            self.parameters["additional_parameters"] = {
                **own,
                **self.parameters["additional_parameters"],
            }
        return self._make_submission_file_text(self._submitit_command_str, "")

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[DelayedSubmission]
    ) -> list[Job[Any]]:
        """Submit all calls with one sbatch; a job waits a minute for its pickle."""
        count = len(delayed_submissions)
        text = self.script(count)
        job_id = self._sbatch(text)
        ids = [f"{job_id}_{index}" for index in range(count)] if count > 1 else [job_id]
        jobs: list[Job[Any]] = [
            self.job_class(folder=self.folder, job_id=i, tasks=[0]) for i in ids
        ]
        jobs[0].paths.submission_file.write_text(text)
        for job, delayed in zip(jobs, delayed_submissions, strict=True):
            delayed.dump(job.paths.submitted_pickle)
        return jobs
