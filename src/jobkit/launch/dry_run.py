"""`--dry-run`: prints the commands or batch scripts of a launch, and writes nothing."""

from jobkit.errors import Exit
from jobkit.launch.command import job_command, local_command, shown
from jobkit.launch.request import LaunchRequest
from jobkit.launch.slurm.options import Submission, submission
from jobkit.permissions import next_folder
from jobkit.spec.study import Plan


def dry_run(plan: Plan, request: LaunchRequest) -> int:
    """Print each command or batch script of a launch; write nothing."""
    from jobkit.launch.launcher import prepare

    made = prepare(plan, request, ask=False)
    for note in (*made.plan.notes, *made.notes):
        print(f"# note: {note}")
    for run_id in plan.runs:
        if run_id not in made.run_ids:
            print(f"# {run_id}: not started again")
    if made.site is None:
        for run_id in made.run_ids:
            command = local_command(
                plan.runs[run_id], plan.paths.run(run_id).folder, request.local_words()
            )
            print(f"# {run_id}\n{shown(command)}")
    elif made.run_ids:
        print_scripts(submission(plan, made.run_ids, made.site, request), request.collect)
    print(f"# {len(made.run_ids)} of {len(plan.runs)} runs would start; nothing was written")
    return Exit.OK


def print_scripts(wanted: Submission, collect: bool) -> None:
    """Print each batch script, followed by the command of each of its runs."""
    from jobkit.launch.slurm.submit import script

    for batch in wanted.batches:
        folder = next_folder(wanted.study.submitit)
        text = script(batch, folder, wanted.at_once, wanted.whole)
        print(f"# --- one sbatch for {len(batch.run_ids)} runs ---\n{text}")
        for index, run_id in enumerate(batch.run_ids):
            paths = wanted.study.run(run_id)
            spec, whole = wanted.plan.runs[run_id], wanted.whole
            command = job_command(spec, paths, whole, wanted.max_restarts)
            print(f"# {index}: {run_id}: {shown(command)}")
    if collect:
        print("# --- and one more job that collects and plots after all of these ---")
