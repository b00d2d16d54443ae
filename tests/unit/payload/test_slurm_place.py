"""A task's place from Slurm's variables: node lists, tasks, ports."""

import pytest

from jobkit.errors import UsageError
from jobkit.payload.place import RankEnv, default_port, expand_nodes, read_rank_env


def test_a_node_list_is_expanded_in_order() -> None:
    for text, names in (
        ("n1,n2", "n1 n2"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[1-3,07-08],gpu[1-2]-ib", "n1 n2 n3 n07 n08 gpu1-ib gpu2-ib"),
        ("r[1-2]c[01-02]b", "r1c01b r1c02b r2c01b r2c02b"),
        ("login-1.site.org", "login-1.site.org"),
        ("n[098-102,7]", "n098 n099 n100 n101 n102 n7"),
    ):
        assert expand_nodes(text) == names.split()
    for wrong in ("", "n[", "n]", "n[1-", "n[a]", "n[1-2", "n,,m", "n[[1]]", "n[]"):
        with pytest.raises(ValueError, match="not a node list"):
            expand_nodes(wrong)


def test_two_jobs_and_two_starts_get_ports_of_their_own() -> None:
    ports = {default_port(job, restart) for job in range(50) for restart in (0, 1)}
    assert len(ports) == 100
    assert min(ports) >= 10_000 and max(ports) < 30_000


TASK = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
TASK |= {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
TASK |= {"SLURM_STEP_NODELIST": "n[7-8]"}


def test_a_task_finds_its_place_and_the_master() -> None:
    place = read_rank_env(TASK)
    assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (5, 1, 8, 4)
    assert (place.master_addr, place.master_port) == ("n7", default_port(77, 0))
    place = read_rank_env({**TASK, "MASTER_PORT": "12345", "JOBKIT_INTERFACE_SUFFIX": "-ib"})
    assert (place.master_addr, place.master_port) == ("n7-ib", 12345)  # what the user set wins
    assert read_rank_env({**TASK, "MASTER_ADDR": "10.0.0.1"}).master_addr == "10.0.0.1"


def test_what_does_not_agree_or_cannot_be_read_is_refused() -> None:
    for name, value, said in (
        ("SLURM_NTASKS", "4", "the step has 4.x2. tasks .* give --nodes and --ntasks-per-node"),
        ("SLURM_STEP_TASKS_PER_NODE", "5,3", "give --nodes and --ntasks-per-node"),
        ("SLURM_STEP_NODELIST", "n[7-", "variables cannot be read: not a node list"),
        ("SLURM_LOCALID", "x", "variables cannot be read: invalid literal"),
    ):
        with pytest.raises(UsageError, match=said):
            read_rank_env({**TASK, name: value})
    none = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"}
    nobody = {"RANK": "-1", "WORLD_SIZE": "0", "LOCAL_WORLD_SIZE": "1"}
    for job in (none, nobody, {**TASK, "SLURM_NTASKS": "0", "SLURM_STEP_TASKS_PER_NODE": "0"}):
        with pytest.raises(UsageError, match=r"do not fill nodes of [01]"):
            read_rank_env(job)
    with pytest.raises(UsageError, match="variables cannot be read: SLURM_JOB_ID is not set"):
        read_rank_env({k: v for k, v in TASK.items() if k != "SLURM_JOB_ID"})


def test_a_place_comes_from_torchrun_else_slurm_else_one_process() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_env({}) == RankEnv()
    place = read_rank_env({**torchrun, "MASTER_ADDR": "h", "MASTER_PORT": "5", "SLURM_PROCID": "0"})
    assert (place.rank, place.nodes, place.master_addr, place.master_port) == (3, 2, "h", 5)
    with pytest.raises(UsageError, match="do not fill nodes of 3"):
        read_rank_env({**torchrun, "LOCAL_WORLD_SIZE": "3"})
