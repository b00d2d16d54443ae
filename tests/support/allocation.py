"""An allocation of two nodes with two GPUs each, in which a preflight finds nothing wrong."""

TOLD = {"log_dir": "/logs", "group": True}


def sound(nodes: int = 2, per_node: int = 2) -> list[dict]:
    """The facts of an allocation in which nothing is wrong."""
    return [
        {
            "rank": rank,
            "local_rank": rank % per_node,
            "world_size": nodes * per_node,
            "local_world_size": per_node,
            "place_fault": "",
            "tasks": nodes * per_node,
            "nodes": [f"n{n + 1}" for n in range(nodes)],
            "host": f"n{rank // per_node + 1}",
            "machine": f"m{rank // per_node}",
            "hostname": f"n{rank // per_node + 1}",
            "master_addr": "n1",
            "master_port": 12345,
            "master_ips": ["10.0.0.1"],
            "own_ips": [f"10.0.0.{rank // per_node + 1}"],
            "interface": "",
            "gpus": per_node,
            "gpu": f"GPU-{rank // per_node}-{rank % per_node}",
            "gpu_bus": f"0000:{rank:02x}:00.0",
            "gpu_name": "X100",
            "driver": "550.54",
            "torch_cuda": "12.6",
            "architectures": ["sm_80", "sm_90"],
            "capability": "sm_86",
            "cores": [rank % per_node * 4 + core for core in range(4)],
            "machine_cores": 64,
            "threads": 2,
            "versions": {"python": "3.11.2", "torch": "2.12", "jobkit": "0.1 (source abc)"},
            "commit": "c0ffee" * 6,
            "log_dir": "/logs",
            "log_fault": "",
            **(
                {"dataset": "cifar10", "data_dir": "/data", "data_fault": "", "cached": True,
                 "cache": "/data/cache/c", "data_dir_fault": ""}
                if rank == 0
                else {}
            ),
        }
        for rank in range(nodes * per_node)
    ]  # fmt: skip


def outcome(facts: list[dict]) -> list[dict]:
    """What the ranks did together, nothing wrong."""
    size = len(facts)
    return [
        {"rank": f["rank"], "host": f["host"], "hidden": [], "cache_fault": "", "backend": "nccl",
         "sum": size * (size + 1) / 2, "latency_us": 20.0, "mib": 256, "members": 2,
         "bus_mb_per_s": 20000.0, "links": [(0, 1, "P2P/CUMEM"), (1, 2, "NET/IB GDRDMA")]}
        for f in facts
    ]  # fmt: skip
