"""hpc/comm.sh as a job on two nodes: both kinds of links are measured."""

from pathlib import Path

from jobkit.analysis.findings.step_links import links_of
from jobkit.metric import comm
from jobkit.paths import RunPaths
from support.checkout import make_checkout


def test_a_job_measures_inside_a_node_and_between_nodes(cluster, tmp_path: Path) -> None:
    kit = make_checkout(tmp_path / "my kit", tmp_path / "data")
    words = ["--max-bytes", "64K", "--iterations", "3"]
    job_id = kit.sbatch(cluster, "hpc/comm.sh", *words)
    ended = cluster.wait(job_id, 480)
    logs = kit.folder / "logs"
    said = "".join((logs / f"comm-{job_id}.{end}").read_text() for end in ("log", "err"))
    assert ended == ("COMPLETED", "0:0"), said
    paths = RunPaths(logs / "comm" / f"job-{job_id}")
    found = comm.read_csv(paths.comm_csv)
    sizes = (1024, 4096, 16384, 65536)
    scopes = [(name, "all", 4, 2) for name in comm.OPERATIONS if name != "sendrecv"]
    scopes += [("sendrecv", "intra_node", 2, 1), ("sendrecv", "inter_node", 2, 2)]
    assert [(s.operation, s.scope, s.ranks, s.nodes, s.bytes) for s in found] == [
        (*scope, size) for scope in scopes for size in sizes
    ]
    assert all(s.correct for s in found)
    links = links_of(comm.read_lines(paths.comm_json))
    assert links.intra is not None and links.inter is not None
