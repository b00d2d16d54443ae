"""Which names a command's parameter cannot have: those of columns with a meaning of their own.

Parameters are columns of results.csv. There one may stand for a setting of jobkit's own training,
as lr or model, of which a command has none; any other column is measured or recorded.
"""

from jobkit.errors import UsageError
from jobkit.spec.placeholders import Value
from jobkit.spec.runspec import SETTINGS, plain_type

_NAMES = """
run_id study series status reason evidence evidence_file exit_code attempts strategy world_size
scaling epochs_planned epochs_done images_per_s time_per_epoch_s time_per_epoch_min_s
time_per_epoch_max_s data_wait_share total_time_s start_time_s end_time_s peak_memory_mib
allocated_memory_mib reserved_memory_mib device_memory_mib resident_memory_mib held_memory_mib
predicted_memory_mib train_loss val_loss val_accuracy best_val_accuracy train_samples test_samples
parameters threads_used device device_planned devices device_type backend torch_version
python_version cuda_version hip_version nccl_version driver_version cudnn_version cudnn_benchmark
node_list git_commit job_id shard_groups problems warnings warnings_text lines_rejected records_lost
throughput throughput_unit throughput_source ranks_together step_time_s step_p50_s step_p95_s
step_p99_s step_max_s steps_timed wall_time_s cpu_busy_mean cpu_busy_max node_memory_mean_mib
node_memory_max_mib gpu_busy_mean gpu_busy_max gpu_memory_mean_mib gpu_memory_max_mib energy_gpu_j
energy_node_j energy_source joules_per_work joules_of work_source problems
"""
_TAKEN = frozenset(_NAMES.split())
_BEGINNINGS = ("startup_", "breakdown_", "slurm_")
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def check_name_free(name: str) -> None:
    """Raise UsageError for a parameter's name that is a column with another meaning."""
    if name in _TAKEN or (name.startswith(_BEGINNINGS) and name not in SETTINGS):
        raise UsageError(f"parameter {name}: results.csv has such a column; choose another name")


def check_fits(name: str, value: Value) -> None:
    """Raise UsageError for a value that the column of a setting of this name cannot hold."""
    if name not in SETTINGS:
        return
    kind = plain_type(name)[0]
    if kind is str or type(value) is kind or (kind is float and type(value) is int):
        return
    raise UsageError(
        f"parameter {name} = {value!r}: column {name} of results.csv holds {_WORDS[kind]}; "
        "choose another name"
    )
