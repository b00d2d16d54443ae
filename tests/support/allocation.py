"""An allocation of two nodes with two GPUs each, in which a preflight finds nothing wrong."""

TOLD = {"probe": ".preflight-1", "group": True}


def sound(nodes: int = 2, per_node: int = 2) -> list[dict]:
    """The facts of an allocation in which nothing is wrong."""
    world, facts = nodes * per_node, []
    for rank in range(world):
        node, local = divmod(rank, per_node)
        name = f"n{node + 1}"
        facts.append({
            "rank": rank, "local_rank": local, "world_size": world, "local_world_size": per_node,
            "tasks": world, "nodes": [f"n{n + 1}" for n in range(nodes)],
            "host": name, "machine": f"m{node}", "hostname": name, "interface": "",
            "master_addr": "n1", "master_port": 12345, "master_ips": ["10.0.0.1"],
            "own_ips": [f"10.0.0.{node + 1}"], "gpus": per_node, "gpu_fault": "",
            "gpu": f"GPU-{node}-{local}", "gpu_bus": f"0000:{rank:02x}:00.0",
            "gpu_name": "X100", "driver": "550.54",
            "torch_cuda": "12.6", "architectures": ["sm_80", "sm_90"], "capability": "sm_86",
            "cores": [local * 4 + core for core in range(4)], "machine_cores": 64, "threads": 2,
            "versions": {"python": "3.11.2", "torch": "2.12", "jobkit": "0.1"},
            "log_dir": "/logs", "log_fault": "",
        })  # fmt: skip
    facts[0] |= {"dataset": "cifar10", "data_dir": "/data", "data_fault": ""}
    facts[0] |= {"cache": "/data/cache/c"}
    return facts


def outcome(facts: list[dict]) -> list[dict]:
    """What the ranks did together, nothing wrong."""
    size = len(facts)
    return [
        {"rank": f["rank"], "host": f["host"], "hidden": False, "backend": "nccl",
         "sum": size * (size + 1) / 2, "latency_us": 20.0, "mib": 256, "members": 2,
         "bus_mb_per_s": 20000.0, "links": [(0, 1, "P2P/CUMEM"), (1, 2, "NET/IB GDRDMA")]}
        for f in facts
    ]  # fmt: skip
