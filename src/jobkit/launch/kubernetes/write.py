"""`run_benchmarks.py --to kubernetes`: one manifest per run, in the study's folder."""

import os
from pathlib import Path

from jobkit.energy import check_counters
from jobkit.errors import Exit, UsageError
from jobkit.launch.command import leave_spec
from jobkit.launch.kubernetes.manifest import manifest, object_name
from jobkit.launch.kubernetes.options import KubernetesOptions
from jobkit.launch.request import LaunchRequest, refuse_logs
from jobkit.paths import write_whole
from jobkit.permissions import closed_to_others
from jobkit.requeue import MAX_RESTARTS
from jobkit.spec.study import Plan

FOLDER = "kubernetes"


def to_kubernetes(
    plan: Plan, options: KubernetesOptions, request: LaunchRequest, dry_run: bool
) -> int:
    """Write the manifest of each run, or print them all; return the exit code."""
    refuse_slurms(request)
    refuse_logs(plan.paths)
    check_counters(os.environ)  # the pods get it
    for spec in plan.runs.values():
        if spec.nodes > 1 and getattr(spec, "launcher", None) == "once":
            raise UsageError(
                f"--launcher once on {spec.nodes} nodes: it starts the command in one pod only: "
                "take srun or torchrun, or sizes of one node"
            )
    if options.gpu_resource != "none" and any(s.whole_node for s in plan.runs.values()):
        # Its pod would get one GPU, of all that it is to drive.
        raise UsageError("dp drives all GPUs of a node, of which --to kubernetes knows no number: "
                         "leave it out of --strategies")  # fmt: skip
    texts = {run_id: text(plan, run_id, options, request) for run_id in plan.runs}
    if dry_run:
        print("---\n".join(texts.values()), end="")
        return Exit.OK
    folder = _write(plan, texts)
    for note in plan.notes:
        print(f"note: {note}")
    print(f"{len(texts)} manifests in {folder}/: nothing was started", flush=True)
    print(
        f"next: kubectl apply -f {folder}/    (docs/kubernetes.md: the volume, and what comes back)"
    )
    return Exit.OK


def refuse_slurms(request: LaunchRequest) -> None:
    """Raise UsageError for an option of a launch by Slurm or on this machine."""
    given = {
        "--site": request.site,
        "an option of Slurm": request.options,
        "--within-allocation": request.within_allocation,
        "--only": request.only,
        "--gpu-request": request.gpu_request,
        "--max-running": request.at_once,
        "--max-node-hours": request.max_node_hours,
        "--monitor-interval and --start-timeout": request.torchrun,
    }
    for name, value in given.items():
        if value:
            raise UsageError(f"{name}: has no effect with --to kubernetes, leave it out")


def text(plan: Plan, run_id: str, options: KubernetesOptions, request: LaunchRequest) -> str:
    """The YAML of one run."""
    spec, run = plan.runs[run_id], plan.paths.run(run_id).folder
    restarts = MAX_RESTARTS if request.max_restarts is None else request.max_restarts
    name = object_name(plan.study.name, run_id)
    on_volume = str(run.relative_to(plan.paths.folder.parent))
    energy = os.environ.get("JOBKIT_ENERGY", "")
    return manifest(name, on_volume, spec, options, restarts, energy)


@closed_to_others()
def _write(plan: Plan, texts: dict[str, str]) -> Path:
    """Write the plan and the manifests; return their folder."""
    plan.save()
    folder = plan.paths.folder / FOLDER
    folder.mkdir(exist_ok=True)
    for run_id, yaml in texts.items():
        leave_spec(plan.paths, run_id, plan.runs[run_id])
        write_whole(folder / f"{run_id}.yaml", yaml)
    return folder
