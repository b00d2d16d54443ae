"""Starts the ranks that verify compares, and shows what they found."""

import json
import math
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from jobkit.checks.verify.cases import CLASSES, DTYPES, Case
from jobkit.checks.verify.rank import Difference, Inject, Orders, be_rank
from jobkit.spec.strategies import FACTS

_LIMIT_S = 300.0
_PRELOAD = ("jobkit.checks.verify.rank", "torch._dynamo")


def verify(
    plans: dict[int, list[Case]],
    inject: Inject | None = None,
    dtypes: Sequence[str] = tuple(DTYPES),
    device: str = "cpu",
    classes: int = CLASSES,
) -> list[Difference]:
    """Run the cases of each world size on processes of their own; return all differences.

    dtypes: of float64 and float32. device: cpu, or cuda for a GPU for each rank. inject is called
    with each trainer that is compared, to put a fault in. Raises RuntimeError when a rank fails.
    """
    found: list[Difference] = []
    with tempfile.TemporaryDirectory(prefix="jobkit-verify-") as name:
        folder = Path(name)
        # One process makes the references of all of them first.
        every = list({case.label: case for cases in plans.values() for case in cases}.values())
        _preload({case.strategy for case in every})
        orders = Orders(folder, tuple(dtypes), singles=every, device=device, classes=classes)
        _run(1, orders)
        for world, cases in plans.items():
            if cases:
                _run(world, replace(orders, cases=cases, singles=(), inject=inject))
                content = json.loads((folder / f"found-{world}.json").read_text())
                found += [Difference(**fields) for fields in content]
    return found


def _preload(strategies: Iterable[str]) -> None:
    """Have the process from which ranks are forked import what they need, once for all."""
    code = {FACTS[name].code.split(".")[0] for name in strategies}
    own = [f"jobkit.payload.strategies.{module}" for module in sorted(code)]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *own])


def _run(world: int, orders: Orders) -> None:
    """Start the ranks and wait for them; when one fails, end the others and raise its reason."""
    # Ranks are forked from a process that has imported torch and never computes: a fork of this
    # one could miss threads, and a fresh start takes seconds for each.
    context = multiprocessing.get_context("forkserver")
    port = _free_port()
    ranks = [
        context.Process(target=be_rank, args=(rank, world, port, orders)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    if not _wait(ranks):
        for process in ranks:
            process.kill()
            process.join()
        reason = orders.folder / "failed"
        raise RuntimeError(reason.read_text() if reason.exists() else f"{world} ranks did not end")


def _wait(ranks: Sequence[BaseProcess]) -> bool:
    """Wait until all have ended well (True), or one has not (False)."""
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        codes = [process.exitcode for process in ranks]
        if any(code not in (None, 0) for code in codes):
            return False
        if None not in codes:
            return True
        time.sleep(0.02)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(found: Sequence[Difference]) -> list[str]:
    """The differences for a reader, one line each, and a verdict."""
    head = ["strategy", "ranks", "dtype", "loss", "gradient", "parameter", "evaluation"]
    rows = [[*head, "tolerance", ""]]
    for d in found:
        numbers = [_short(x) for x in (d.loss, d.gradient, d.parameter, d.evaluation, d.tolerance)]
        rows.append([d.case, str(d.world_size), d.dtype, *numbers, "ok" if d.ok else "OVER"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    over = sum(not d.ok for d in found)
    lines.append("")
    lines.append(f"{over} of {len(found)} over the tolerance" if over else "all are within it")
    return lines


def _short(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) and value else f"{value:g}"
