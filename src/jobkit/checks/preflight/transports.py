"""The check of the ways that NCCL took between the ranks, and of the bandwidth for its network."""

from collections import defaultdict
from collections.abc import Sequence

from jobkit.checks.preflight.finding import CheckResult, Facts, many
from jobkit.checks.preflight.nccl import Link

_LEAST_NCCL_MB = 5000.0  # where no rate is known: TCP over a fast network gives 1 to 3 GB/s
_LEAST_GLOO_MB = 100.0
_LEAST_SHARE = 0.25  # chosen, of the fastest interface's rate: TCP reaches a tenth of 200 Gb/s
_TCP = (
    "check NCCL_NET, NCCL_IB_DISABLE, NCCL_IB_HCA and, in a container, that the network's devices "
    "and NCCL's plug-in are inside; on Slingshot NCCL_NET='AWS Libfabric' (or OFI) makes it fail "
    "instead of falling back"
)
_NO_PEER = (
    "GPUs of a node copy by way of the host's memory: let each rank see all GPUs of its node "
    "(--gpu-bind=none), and check NCCL_P2P_DISABLE and ACS"
)


def transports(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """Return which way NCCL took between which ranks, with notes on the slow ones."""
    found = CheckResult("transports")
    hosts = {f["rank"]: f["host"] for f in facts}
    if not any(r.get("backend") == "nccl" for r in results):
        return found
    ways = _ways(results)
    if not ways:
        found.notes.append("transports: NCCL's log has no line of a connection (NCCL_DEBUG_FILE)")
        return found
    texts = [f"{kind} between {_pairs(pairs)}" for kind, pairs in ways.items()]
    found.text = "; ".join(texts)
    fast = sorted({name for f in facts for name in f.get("nics", {})})
    for kind, pairs in ways.items():
        near = [pair for pair in pairs if hosts.get(pair[0]) == hosts.get(pair[1])]
        if kind.startswith("NET/Socket"):
            there = f", and there are {', '.join(fast[:4])}" if fast else ""
            text = f"transports: NCCL uses TCP ({kind}) between {_pairs(pairs)}{there}: {_TCP}"
            found.notes.append(text)
        elif kind.startswith(("NET/", "SHM")) and near:
            found.notes.append(f"transports: {kind} between {_pairs(near)} of a node: {_NO_PEER}")
        elif kind.startswith("NET/") and not kind.endswith("GDRDMA"):
            found.notes.append(
                f"transports: {kind} between {_pairs(pairs)} is without GPUDirect RDMA: it copies "
                "by way of the host's memory (nvidia_peermem or dma-buf is missing)"
            )
    return found


def _ways(results: Sequence[Facts]) -> dict[str, list[tuple[int, int]]]:
    """Return the pairs of ranks of each way, as `NET/IB GDRDMA`."""
    ways: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for result in results:
        for text in result.get("links", []):
            try:
                link = Link.decode(text)
            except ValueError:
                continue
            kind = f"{link.kind} GDRDMA" if link.direct else link.kind
            ways[kind].add((link.first, link.second))
    return {kind: sorted(ways[kind]) for kind in sorted(ways)}


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    first = ", ".join(f"{a}-{b}" for a, b in pairs[:3])
    more = ", ..." * (len(pairs) > 3)
    return f"{many(len(pairs), 'pair')} of ranks ({first}{more})"


def least_mb_per_s(facts: Sequence[Facts], backend: str) -> float:
    """Return the busbw between nodes below which a network is slow for a backend.

    On NCCL a share of the rate of each node's fastest interface, the least over the nodes.
    """
    if backend != "nccl":
        return _LEAST_GLOO_MB if backend == "gloo" else 0.0
    rates = [max(f["nics"].values()) for f in facts if f.get("nics")]
    return min(rates) / 8 * 1000 * _LEAST_SHARE if rates else _LEAST_NCCL_MB
