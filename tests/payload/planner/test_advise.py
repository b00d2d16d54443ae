"""`jobkit advise`: the time that messages take, the choice, and what is said where nothing fits."""

import re
import shlex
from typing import Any

import pytest

from jobkit.errors import Exit
from jobkit.payload.main import parser as payload_parser
from jobkit.planner.advise import Option, choose, links_of, main
from jobkit.planner.footprint import Footprint, Subject, footprint, idle_share, step_messages
from jobkit.spec.options import chosen_settings
from jobkit.spec.runspec import RunSpec
from jobkit.spec.traffic import seconds

MLP = 1_707_274 * 4  # bytes of its parameters
LINKS = links_of(network=10.0, link=100.0)
FSDP = {"strategy": "fsdp", "ranks_per_node": 4, "nodes": 2, "fsdp_hybrid_replicas": 2}
PP = {"strategy": "pp", "ranks_per_node": 2, "global_batch_size": 512}
TIMES = {
    "hybrid: a node inside, and the shards over the network": (
        FSDP, 1.5 * MLP / 100e9 + MLP / 10e9),
    "512 images' 512 hidden numbers, and their gradients": (PP, 2 * 512 * 512 * 4 / 100e9),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "expected"), TIMES.values(), ids=TIMES)
def test_the_time_to_send(settings: dict[str, Any], expected: float) -> None:
    spec = RunSpec(**{"model": "mlp", **settings})
    messages = step_messages(footprint(spec, Subject()), Subject())
    assert messages and seconds(messages, LINKS) == pytest.approx(expected, rel=1e-6)


def test_a_pipeline_waits_for_its_stages() -> None:
    pp = RunSpec(model="mlp", strategy="pp", ranks_per_node=2, microbatches=8)
    whole = RunSpec(model="mlp", strategy="mp", ranks_per_node=3)
    specs = (pp, whole, RunSpec(ranks_per_node=2))
    assert list(map(idle_share, specs)) == pytest.approx([1 / 9, 2 / 3, 0])


def option(name: str, total: int, seconds: float, idle: float = 0.0, usable: int = 100) -> Option:
    spec = RunSpec(strategy=name, ranks_per_node=4)
    size = Footprint(spec=spec, parameters=total, gradients=0, stepped=0)
    return Option(size, total <= usable, seconds, "1", idle)


def test_the_choice_follows_memory_then_communication() -> None:
    for options, name in [
        ([option("ddp", 90, 1.0), option("fsdp", 50, 1.0)], "ddp"),  # equals: the simpler one
        ([option("ddp", 90, 2.0), option("fsdp", 50, 1.0)], "fsdp"),
        ([option("ddp", 101, 1.0), option("fsdp", 50, 9.0)], "fsdp"),
        ([option("ddp", 100, 9.0), option("pp", 1, 0.1, 0.1)], "ddp"),  # all ranks at work
        ([option("fsdp", 101, 1.0), option("mp", 9, 0.1, 0.5), option("pp", 9, 0.2, 0.1)], "pp"),
        ([option("ddp", 101, 1.0), option("pp", 101, 1.0)], None),
    ]:
        taken = choose(options)
        assert (taken and taken.footprint.spec.strategy) == name


def test_what_is_not_known_is_not_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus-per-node", "4", "--device-memory", "16", "--ddp-comm-hook", "powersgd")
    assert main(["--model", "cnn", *words]) == Exit.OK
    told = capsys.readouterr().out
    assert re.search(r"ddp .* yes +- +- +0%\n", told), told
    assert "how much it communicates is not known" in told and "None" not in told


WIDE = ("--model", "cnn", "--width", "8", "--optimizer", "adamw", "--gpus-per-node", "4")


def test_the_command_is_that_of_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*WIDE, "--nodes", "2", "--link-gb-per-s", "300", "--network-gb-per-s", "12.5")
    assert main([*words, "--device-memory", "80"]) == Exit.OK
    told = capsys.readouterr().out
    head, _, rest = told.splitlines()[-1].strip().partition(" run.sh ")
    assert head == "sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4"
    spec = RunSpec(
        **chosen_settings(payload_parser().parse_args(shlex.split(rest))), nodes=2, ranks_per_node=4
    )
    assert spec.fsdp_hybrid_replicas == 2 and "\nrecommended: fsdp, hybrid\n" in told
    assert (spec.width, spec.optimizer) == (8, "adamw")
    assert "of those that fit it communicates least" in told


def test_a_pipeline_is_taken_where_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """One layer has nearly all parameters: gathered it is too large, wherever it is sharded."""
    words = ("--model", "mlp", "--width", "16", "--gpus-per-node", "2", "--images", "0")
    # pp takes 0.528 GiB, fsdp 0.586; 0.9 of the memory may be used.
    assert main([*words, "--device-memory", "0.62"]) == Exit.OK
    told = capsys.readouterr().out
    assert "recommended: pp\n" in told and "no strategy that splits the batch fits" in told


def test_where_nothing_fits_the_smallest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "cnn", "--device-memory", "0.001"]) == Exit.THRESHOLD
    told = capsys.readouterr().out
    assert "nothing fits into 0.0009 GiB. The smallest is single with 0." in told
    assert told.rstrip().endswith("--activation-checkpointing")
