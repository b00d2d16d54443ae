"""A task's place from Slurm's variables: node lists, tasks, ports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.errors import UsageError
from jobkit.payload.place import default_port, expand_nodes, read_slurm, tasks_per_node


def test_a_node_list_is_expanded_in_order() -> None:
    for text, names in (
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[1-3,07-08],gpu[1-2]-ib", "n1 n2 n3 n07 n08 gpu1-ib gpu2-ib"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("r[1-2]c[01-02]b", "r1c01b r1c02b r2c01b r2c02b"),
        ("login-1.site.org", "login-1.site.org"),
        ("n[098-102,7]", "n098 n099 n100 n101 n102 n7"),
    ):
        assert expand_nodes(text) == names.split()
    for wrong in ("", "n[", "n]", "n[1-", "n[a]", "n[1-2", "n,,m", "n[[1]]", "n[]"):
        with pytest.raises(ValueError, match="not a node list"):
            expand_nodes(wrong)


def test_tasks_of_the_nodes_are_expanded() -> None:
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("1") == [1]
    with pytest.raises(ValueError, match="not a list of tasks"):
        tasks_per_node("4x2")


@given(st.integers(1, 2**31), st.integers(0, 50), st.integers(1024, 40000), st.integers(1, 25000))
def test_the_port_lies_outside_the_range_of_the_system(
    job: int, restart: int, low: int, span: int
) -> None:
    port = default_port(job, restart, (low, low + span))
    assert 1024 <= port < 65536
    assert not low <= port <= low + span


def test_two_jobs_and_two_starts_get_ports_of_their_own() -> None:
    ports = {default_port(job, restart, (32768, 60999)) for job in range(50) for restart in (0, 1)}
    assert len(ports) == 100


TASK = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "n[7-8]",
}


def test_a_task_finds_its_place_and_the_master() -> None:
    port = read_slurm({**TASK, "SLURM_PROCID": "0"})["master_port"]
    sizes = {"rank": 5, "local_rank": 1, "world_size": 8, "local_world_size": 4}
    assert read_slurm(TASK) == {**sizes, "master_addr": "n7", "master_port": port}


def test_what_the_user_set_wins() -> None:
    place = read_slurm({**TASK, "MASTER_PORT": "12345", "JOBKIT_INTERFACE_SUFFIX": "-ib"})
    assert (place["master_addr"], place["master_port"]) == ("n7-ib", 12345)
    assert read_slurm({**TASK, "MASTER_ADDR": "10.0.0.1"})["master_addr"] == "10.0.0.1"


def test_what_does_not_agree_or_cannot_be_read_is_refused() -> None:
    for name, value, said in (
        ("SLURM_NTASKS", "4", "give --nodes and --ntasks-per-node"),
        ("SLURM_STEP_TASKS_PER_NODE", "5,3", "give --nodes and --ntasks-per-node"),
        ("SLURM_STEP_NODELIST", "n[7-", "Slurm's variables cannot be read"),
    ):
        with pytest.raises(UsageError, match=said):
            read_slurm({**TASK, name: value})
