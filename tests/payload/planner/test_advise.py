"""`jobkit advise`: the time that messages take, the choice, and what is said where nothing fits."""

import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest

from jobkit.errors import Exit
from jobkit.payload.main import parser as payload_parser
from jobkit.planner.advise import main
from jobkit.planner.footprints import Subject, footprint, label_of, strategy_of
from jobkit.planner.traffic import duration, links, step_messages, step_s
from jobkit.spec.options import given_settings
from jobkit.spec.runspec import RunSpec

MLP = 1_707_274 * 4  # bytes of its parameters
LAST = 2_570 * 4  # and of its last layer's
LINKS = links(network=10.0, link=100.0)


FSDP = {"strategy": "fsdp", "ranks_per_node": 4}
PP = {"strategy": "pp", "ranks_per_node": 2, "pipeline_split": "3", "global_batch_size": 512}
TIMES = {
    "one node: 2 x 3/4 of the gradients in a ring of four": (
        {"ranks_per_node": 4}, 2 * 3 / 4 * MLP / 100e9),
    "two nodes: what crosses the network sets the pace": (
        {"nodes": 2, "ranks_per_node": 4}, 2 * 7 / 8 * MLP / 10e9),
    "half the bytes": ({"ranks_per_node": 4, "ddp_comm_hook": "bf16"}, 3 / 4 * MLP / 100e9),
    "one group, which stays gathered": (FSDP, 2 * 3 / 4 * MLP / 100e9),
    "each block gathered twice, but the last once": (
        {**FSDP, "fsdp_group_mib": 0.0}, 3 / 4 * (3 * MLP - LAST) / 100e9),
    "gathers in bf16, the reduction in fp32": (
        {**FSDP, "precision": "bf16", "accumulate": 3}, (3 / 2 + 1) * 3 / 4 * MLP / 100e9),
    "hybrid: a node inside, and the shards over the network": (
        {**FSDP, "nodes": 2, "fsdp_hybrid_replicas": 2}, 1.5 * MLP / 100e9 + MLP / 10e9),
    "512 images' 512 hidden numbers, and their gradients": (PP, 2 * 512 * 512 * 4 / 100e9),
    "alone": ({"strategy": "single"}, 0.0),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "expected"), TIMES.values(), ids=TIMES)
def test_the_time_to_send(settings: dict[str, Any], expected: float) -> None:
    spec = RunSpec(**{"model": "mlp", **settings})
    found = step_s(step_messages(footprint(spec, Subject()), Subject()), LINKS)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_pipeline_waits_for_its_stages() -> None:
    pp = RunSpec(model="mlp", strategy="pp", ranks_per_node=2, microbatches=8)
    by_turns = replace(pp, pipeline_schedule="interleaved")
    whole = RunSpec(model="mlp", strategy="mp", ranks_per_node=3)
    specs = (pp, by_turns, whole, RunSpec(ranks_per_node=2))
    found = [strategy_of(spec).idle_share() for spec in specs]
    assert found == pytest.approx([1 / 9, 1 / 17, 2 / 3, 0])
    assert [duration(s) for s in (0.0125, 2.5, float("nan"))] == ["12.5 ms", "2.5 s", "-"]


def advice(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


WIDE = ("--model", "cnn", "--width", "8", "--optimizer", "adamw", "--gpus-per-node", "4")


def test_the_choice_follows_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """DDP where it fits; a sharded mode where only that does; and each time one that fits."""
    code, roomy = advice(capsys, *WIDE, "--device-memory", "80")
    assert (code, roomy["strategy"]) == (Exit.OK, "ddp")
    need = {o["strategy"]: o["total_mib"] / 1024 for o in roomy["options"]}
    assert need["fsdp, full shard"] < need["ddp"]
    between = (need["ddp"] + need["fsdp, full shard"]) / 2
    code, tight = advice(capsys, *WIDE, "--device-memory", str(between / 0.9))
    assert code == Exit.OK
    assert tight["strategy"].startswith("fsdp")
    of = {o["strategy"]: o for o in tight["options"]}
    assert of[tight["strategy"]]["fits"] and not of["ddp"]["fits"]
    fitting = [o for o in of.values() if o["fits"] and o["strategy"] not in ("pp", "mp")]
    assert of[tight["strategy"]]["communication_s"] == min(o["communication_s"] for o in fitting)
    assert len(fitting) > 1


def test_the_command_is_that_of_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*WIDE, "--nodes", "2", "--link-gb-per-s", "300", "--network-gb-per-s", "12.5")
    _, found = advice(capsys, *words, "--device-memory", "80")
    head, _, rest = found["command"].partition(" run.sh ")
    assert head == "sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4"
    given = given_settings(payload_parser().parse_args(shlex.split(rest)))
    spec = RunSpec(**given, nodes=2, ranks_per_node=4)
    assert label_of(spec) == found["strategy"] == "fsdp, hybrid"
    assert (spec.width, spec.optimizer) == (8, "adamw")
    assert any("of those that fit it has the least communication" in line for line in found["why"])


def test_a_pipeline_is_taken_where_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """One layer has nearly all parameters: gathered it is too large, wherever it is sharded."""
    words = ("--model", "mlp", "--width", "16", "--gpus-per-node", "2", "--device-memory")
    _, found = advice(capsys, *words, "80")
    need = {o["strategy"]: o["total_mib"] / 1024 for o in found["options"]}
    others = [need[label] for label in need if label not in ("pp", "mp")]
    assert min(need["pp"], need["mp"]) < min(others)
    limit = (max(need["pp"], need["mp"]) + min(others)) / 2
    code, found = advice(capsys, *words, str(limit / 0.9))
    assert (code, found["strategy"]) == (Exit.OK, "pp")
    assert "no strategy that splits the batch fits" in found["why"][-1]


def test_the_text_says_what_to_take_why_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "mlp", "--device-memory", "80", "--gpus-per-node", "2"]) == Exit.OK
    told = capsys.readouterr().out
    assert re.search(r"^\*  ddp +0\.\d+ +yes +[\d.]+ [mu]s +1 +0%$", told, re.MULTILINE)
    assert "\nrecommended: ddp\n" in told
    assert told.endswith("run.sh --strategy ddp --model mlp\n")


def test_where_nothing_fits_the_smallest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "cnn", "--device-memory", "0.001"]) == Exit.THRESHOLD
    told = capsys.readouterr().out
    assert "nothing fits into 0.0009 GiB. The smallest is single with 0." in told
    assert "--activation-checkpointing" in told
    # 70e9 x 16 bytes are 1043 GiB, on eight GPUs 130.
    words = ("--parameters", "70e9", "--optimizer", "adamw", "--gpus-per-node", "8")
    assert main([*words, "--device-memory", "80"]) == Exit.THRESHOLD
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.endswith(" with 130 GiB: ask again with more GPUs")
    code, found = advice(capsys, *words, "--device-memory", "80")
    assert (code, found["strategy"], found["command"]) == (Exit.THRESHOLD, None, None)
