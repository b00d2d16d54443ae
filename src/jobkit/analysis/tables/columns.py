"""The columns of every CSV file, TABLES: the one place of their names, types and meanings.

docs/contributing.md says how to add a column of results.csv. Settings that differ between the runs
are columns too, by their own names; spec.json of a run has all of them.

An empty cell means that the value is not known; no number stands for "unknown". A unit is part of
the name: _s seconds, _mib 2**20 bytes, _share 0 to 1.
"""

from dataclasses import dataclass

from jobkit.metric.kinds import KINDS
from jobkit.outcome.state import STATUSES


@dataclass(frozen=True)
class Column:
    """A column: its name with the unit in it, its type, and its meaning."""

    name: str
    dtype: str  # of pandas, a nullable one
    meaning: str
    record: str = ""  # the kind of record and the field that it is, if it is one
    field: str = ""


TEXT, COUNT, NUMBER, FLAG = "string", "Int64", "Float64", "boolean"
_TYPES = {"TEXT": TEXT, "COUNT": COUNT, "NUMBER": NUMBER, "FLAG": FLAG}
_BETWEEN_RUNS = "end of the 95 % interval between runs; empty without repeats"


def _columns(text: str, end: str = _BETWEEN_RUNS) -> tuple[Column, ...]:
    """Columns from lines of names, type and meaning; an indented line goes on with the meaning.

    =KIND is the field of this name in that record, =KIND.FIELD another one; =results is the column
    of results.csv. A * in a name makes three columns: the value and, with _low and _high in its
    place, the two ends of its interval.
    """
    columns = []
    for line in text.strip().replace("\n    ", " ").splitlines():
        names, kind, meaning = line.split(maxsplit=2)
        record, _, field = meaning[1:].partition(".") if meaning.startswith("=") else ("", "", "")
        for name in names.split(","):
            if record == "results":
                columns.append(next(column for column in RESULTS if column.name == name))
            elif record:
                own = field or name
                columns.append(Column(name, _TYPES[kind], KINDS[record][own], record, own))
            else:
                columns.append(Column(name.replace("*", ""), _TYPES[kind], meaning))
            if "*" in name:
                for mark, which in (("_low", "lower"), ("_high", "upper")):
                    columns.append(Column(name.replace("*", mark), _TYPES[kind], f"{which} {end}"))
    return tuple(columns)


RESULTS = _columns(f"""
run_id TEXT id of the run: its folder's name, and its key in epochs.csv
study TEXT name of the study's folder
series TEXT strategy and every setting that varies in the study: runs of one series differ in size
    and repeat only
status TEXT {", ".join(STATUSES[:-1])} or {STATUSES[-1]}
reason TEXT cause, if not ok
evidence TEXT the line of a log or file that shows it
evidence_file TEXT file of that line: RUN_ID/FILE
exit_code COUNT exit code of the job, if known
attempts COUNT starts of the run; each requeue adds one
strategy TEXT parallel strategy
model TEXT cnn, fast_cnn, resnet18, mlp, or package.module:factory
nodes COUNT =run_start
ranks_per_node COUNT ranks per node
world_size COUNT =run_start
scaling TEXT strong: the global batch is constant; weak: the batch per rank is
global_batch_size,batch_size_per_rank COUNT =run_start
precision TEXT fp32, bf16 or fp16; auto: the run has not begun
dataset TEXT data of the training
fp32 TEXT arithmetic of fp32 on a GPU: ieee or tf32; auto: the run has not begun
repeat COUNT index of the repeat, from 0
epochs_planned COUNT planned epochs
epochs_done COUNT recorded epochs
time_per_epoch_s NUMBER training time of one whole epoch: train_samples / throughput
data_wait_share NUMBER share of the steps' time spent waiting for batches
startup_s NUMBER =startup.total_s
total_time_s NUMBER from the start of the process to its end, newest attempt
start_time_s NUMBER Unix time of the first record of the newest attempt
end_time_s NUMBER Unix time of its last record
peak_memory_mib NUMBER =epoch
train_loss NUMBER training loss of the last recorded epoch
val_loss NUMBER final validation loss; of the last recorded epoch without run_end
val_accuracy NUMBER final validation accuracy, likewise: share of test samples, 0 to 1
best_val_accuracy NUMBER maximum validation accuracy over epochs
breakdown_compute_s NUMBER of a step: kernels on a GPU, operations of torch on the CPU; a mean over
    the ranks, as the next three
breakdown_communication_s NUMBER of a step: exposed communication, with waiting_s; nothing computes
breakdown_data_wait_s NUMBER of a step: waiting for batches; on a GPU while it is idle
breakdown_host_s NUMBER of a step: the rest: Python, launches, the program's own code
breakdown_waiting_s NUMBER of a step: waiting inside collectives for ranks that come later
breakdown_last_rank_wait_s NUMBER of a step: waiting for the last rank's end of the step
breakdown_iteration_s NUMBER of a step: the first four and last_rank_wait_s
breakdown_useful_max_s NUMBER of a step: compute and host, of a rank late by them, else the mean
breakdown_busy_max_s NUMBER of a step: the same with data wait
breakdown_random_imbalance_s NUMBER of a step: lost as a different rank is late each time,
    and slow_steps_s
breakdown_slow_steps_s NUMBER of a step: the mean of the run less a typical step, for other reasons
    than data; in communication_s and waiting_s, of one rank in host_s
breakdown_difference_s NUMBER of a step: ddp of jobkit's own training: the time above that without
    communication
breakdown_ranks COUNT ranks that were profiled
breakdown_late_s NUMBER of a step: by how much the late rank or node is later than the others
breakdown_late_rank COUNT the rank that comes last beyond chance; empty for a whole node
breakdown_late_host TEXT its node, or the node that comes last beyond chance
breakdown_late_device TEXT its GPU
breakdown_late_cause TEXT what it spends more time with than others: compute, data wait or host
breakdown_by_rank TEXT where one is late: the parts of up to 16 ranks, as JSON
breakdown_not_profiled TEXT why no step was profiled
train_samples,test_samples,parameters COUNT =run_start
threads_used COUNT =run_start.threads
device TEXT =run_start
devices COUNT =run_start
device_type,backend TEXT =run_start
torch_version,python_version,cuda_version,hip_version,nccl_version,driver_version,cudnn_version TEXT
    version of it, as run_start says it; empty where there is none
cudnn_benchmark TEXT whether cuDNN chose kernels by timing them; empty on the CPU
gpu_max_clock TEXT highest clock of the first GPU; empty on the CPU
gpu_power_limit TEXT power limit of the first GPU; likewise
node_list,git_commit,job_id TEXT =run_start
shard_groups COUNT =run_start
warnings COUNT number of warnings and errors that the run recorded
warnings_text TEXT their texts without duplicates, joined by ' | '
lines_rejected COUNT [METRIC] lines rejected (truncated or bad checksum)
records_lost COUNT records missing in every source: sequence gaps
throughput NUMBER rate over all ranks, in throughput_unit, without the warm-up; empty where it is
    of another kind than those of its size
throughput_unit TEXT its unit: images/s, tokens/s, steps/s, ...; of wall times runs/h, shares/h
throughput_source TEXT what measured it: meter, auto, pattern NAME (what its times have in
    them), metric lines, or the wall time of the run
step_time_s NUMBER time of one optimizer step, without the warm-up
wall_time_s NUMBER from the start of the run's job to its end
ranks_together TEXT what shows that the ranks of a command worked together; none: they are copies;
    unknown: the run ended before it could be seen
cpu_busy_mean NUMBER load of all cores of the nodes over the run, whoever caused it, 0 to 1: mean
    over time and nodes
other_load_mean NUMBER of cpu_busy_mean, what is not of the run's own processes
node_memory_max_mib NUMBER memory in use of the nodes, whoever caused it: largest sample
gpu_busy_mean NUMBER share of the time in which a kernel was running on the GPUs, 0 to 1
gpu_memory_max_mib NUMBER memory of the GPUs in use: largest sample
gpu_processes_max NUMBER processes that compute on a GPU of the run: largest sample
energy_gpu_j NUMBER energy of the run's GPUs in joules, training and evaluation
energy_node_j NUMBER energy of its nodes, if the job had them alone
energy_source TEXT counter and scope of each: empty if nothing was measured
joules_per_work NUMBER energy per unit of work (image, token), evaluation included
joules_of TEXT whose energy that is: node or gpu
work_source TEXT where the work of a step comes from: stated, counted or inferred
problems TEXT what is wrong with the run's records, joined by ' | '
""")
_OF_RUN = "run_id,study,series TEXT =results"
_PLACE = """world_size COUNT number of ranks
repeat COUNT index of the repeat, from 0
attempt COUNT index of the attempt, from 0"""
EPOCHS = _columns(f"""
{_OF_RUN}
strategy TEXT =results
{_PLACE}
epoch,iterations COUNT =epoch
train_loss,val_loss,val_accuracy,epoch_time_s NUMBER =epoch
timed_images COUNT =epoch
images_per_s,eval_time_s,data_wait_s,peak_memory_mib,allocated_memory_mib NUMBER =epoch
reserved_memory_mib,device_memory_mib,resident_memory_mib,lr,begun_at NUMBER =epoch
""")
STEPS = _columns(f"""
{_OF_RUN}
{_PLACE}
step COUNT index of the last step, as the program counts
epoch COUNT the epoch, as the program counts
steps COUNT optimizer steps
warmup FLAG whether they are not compared: of the warm-up, or with an evaluation in them
time_s NUMBER wall time of these steps, maximum over ranks, without pauses
throughput NUMBER rate over all ranks, in throughput_unit
throughput_unit TEXT unit of throughput
data_wait_s NUMBER part of time_s spent waiting for batches, maximum over ranks
""")
SAMPLES = _columns(f"""
{_OF_RUN}
{_PLACE}
rank COUNT the rank that sampled
t NUMBER Unix time in seconds
at_s NUMBER =sample
host TEXT =sample
alone FLAG =sample
cpu_busy,other_load,memory_mib,gpu_busy,gpu_memory_mib,gpu_processes NUMBER =sample
gpu_uuids TEXT =sample
energy_gpu_j,energy_node_j NUMBER =sample
energy_source TEXT =sample
""")
SCALING = _columns("""
study,series,strategy TEXT =results
nodes,ranks_per_node,world_size COUNT =results
scaling TEXT =results
global_batch_size,batch_size_per_rank COUNT =results
devices COUNT GPUs (CPU: processes) that compute: more than world_size with dp
runs_planned COUNT planned runs of this series at this size
runs_ok COUNT successful runs of these: only they enter the medians
baseline TEXT the size that speed-up and efficiency are relative to, and the rule that selects it
base_series TEXT series of the baseline
base_world_size COUNT number of ranks of the baseline
speed_up* NUMBER throughput / throughput of the baseline (weak scaling: the scaled speed-up)
efficiency* NUMBER speed_up x devices of the baseline / devices
target_accuracy NUMBER target validation accuracy: --accuracy, else the highest that all
    successful runs reached
epochs_to_accuracy NUMBER epochs to the target, median; empty if a successful run did not reach it
time_to_accuracy_s NUMBER mean epochs to the target x mean_time_s: training only, without start-up
    and evaluation; empty where time_of is no epoch
spread_from TEXT repeats of this size, and over how many sizes their spread is pooled; empty if no
    size of the study was repeated
outliers TEXT run_ids that are outliers among the repeats; the medians include them
note TEXT why there is no comparison, if there is none
throughput_unit TEXT unit of throughput: images/s, samples/s, tokens/s, steps/s; of wall times
    runs/h, shares/h
throughput* NUMBER rate over all ranks: median of successful repeats
throughput_per_rank NUMBER throughput / ranks; dp: / GPUs
time_of TEXT what time_s is of: epoch, an amount of work as 10M tokens, or run
time*_s NUMBER time of that: the amount / throughput
mean_time_s NUMBER time_s by the mean over runs, as costs need it
gpu_hours NUMBER mean_time_s x devices / 3600 (CPU: processes)
node_hours NUMBER mean_time_s x nodes / 3600
joules_per_work NUMBER energy per unit of work: median of successful repeats
joules_of TEXT whose energy that is: node or gpu
energy_kwh NUMBER energy of what time_s is of: an epoch, or an amount of work
step_time_s NUMBER time of one optimizer step: median of successful repeats
gpu_busy NUMBER gpu_busy_mean of the runs: median
""")
FORECAST = _columns(
    """
study,series TEXT =results
law TEXT average: of scaling laws; measured links: with those of jobkit comm
measured_sizes TEXT world sizes that the forecast was made from
times_beyond NUMBER world_size / the largest measured size
world_size COUNT number of ranks
nodes COUNT nodes that they need
speed_up* NUMBER forecast: throughput / the value of the laws at the baseline
efficiency* NUMBER forecast: speed_up x base_world_size / world_size
throughput* NUMBER forecast: rate over all ranks, in throughput_unit
time*_s NUMBER forecast: time of time_of: an epoch, or an amount of work
node_hours* NUMBER forecast: time_s x nodes / 3600
throughput_unit TEXT unit of throughput
time_of TEXT what time_s is of
""",
    end="end of the 95 % prediction interval of one more run",
)
COMM = _columns("""
operation,scope TEXT =comm
ranks,nodes,bytes,iterations COUNT =comm
time_s,time_low_s,time_high_s,algorithm_gb_per_s,bus_gb_per_s NUMBER =comm
correct FLAG =comm
""")
DRILL = _columns("""
fault TEXT the injected fault
where TEXT nodes of the first attempt, or 'here'; empty if the fault is not possible there
first_status TEXT status of the attempt into which the fault was injected
evidence TEXT the line of a log or file that shows it
final_status TEXT status of the run after all attempts
attempts COUNT number of attempts of the run
detected_s NUMBER from the injection to the end of the first attempt, as the launcher saw it
restart_s NUMBER from the start of the next attempt to its first iteration
iterations_lost COUNT iterations of the training redone after the restart
same_parameters FLAG whether the final parameters are bitwise equal to those without a fault
orphans COUNT leaked processes; empty if they cannot be observed
note TEXT other deviations from the expected result
""")

# By the file's name without .csv. comm.csv and drill.csv are written by the commands of that name.
TABLES = {
    "results": RESULTS,
    "epochs": EPOCHS,
    "steps": STEPS,
    "samples": SAMPLES,
    "scaling": SCALING,
    "forecast": FORECAST,
    "comm": COMM,
    "drill": DRILL,
}
