"""What a preflight says of a low bandwidth while nodes have other work: facts and files made up."""

from pathlib import Path

import pytest

from jobkit.checks.preflight import node
from jobkit.checks.preflight.messages import is_valid
from jobkit.checks.preflight.report import judge_together
from support.allocation import TOLD, outcome, sound


def faulty(facts: list[dict], results: list[dict]) -> set[str]:
    return {f.check for f in judge_together(facts, results, TOLD) if f.faults}


def notes_on(word: str, facts: list[dict], results: list[dict]) -> list[str]:
    notes = [n for f in judge_together(facts, results, TOLD) for n in f.notes]
    return [note for note in notes if word in note]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"load": 9.4, "core_wait_share": 0.0}, "n2 was busy: load 9.4 on 8 cores"),
        (
            {"load": 2.0, "core_wait_share": 0.7},
            "n2 was busy: load 2.0 on 8 cores, a process waited for a core 70% of the time",
        ),
    ],
)
def test_a_low_bandwidth_on_a_busy_node_is_a_note_with_that_reason(state: dict, words: str) -> None:
    facts = sound()
    results = outcome(facts)
    for one in results:
        one["bus_mb_per_s"] = 3.0
    assert faulty(facts, results) == {"bandwidth"}
    results[0] |= {"load": 8.0, "core_wait_share": 0.49}  # no node is busy
    assert faulty(facts, results) == {"bandwidth"}
    results[3] |= state
    assert is_valid("results", results[3])
    # Between nodes it may be a wrong interface: still a fault, with the reason.
    (fault,) = [f for found in judge_together(facts, results, TOLD) for f in found.faults]
    assert f", while {words}" in str(fault)
    for one in results:
        one["bus_mb_per_s"] = 60.0  # slow, and no fault on idle nodes either
    (note,) = notes_on("bandwidth", facts, results)
    assert f"as {words}: check again" in note
    for one in results:
        one["bus_mb_per_s"] = 20000.0  # a busy node alone is not worth a note
    assert not notes_on("busy", facts, results)


def test_inside_a_busy_node_even_an_absurd_one_is_a_note() -> None:
    facts = [one for one in sound() if one["host"] == "n2"]
    results = outcome(facts)
    for one in results:
        one["bus_mb_per_s"] = 3.0
    assert "bandwidth" in faulty(facts, results)
    results[-1] |= {"load": 9.4, "core_wait_share": 0.0}
    assert "bandwidth" not in faulty(facts, results)
    (note,) = notes_on("bandwidth", facts, results)
    assert "which says little of the network, as n2 was busy" in note


def test_how_busy_a_node_is_from_the_kernels_files(tmp_path: Path) -> None:
    assert node.busy_since(node.core_waits(tmp_path), tmp_path)["load"] == 0.0  # no such files
    (tmp_path / "loadavg").write_text("9.25 2.00 1.00 3/400 123\n")
    (tmp_path / "pressure").mkdir()
    waits = "some avg10=1.00 avg60=1.00 avg300=1.00 total={}\nfull avg10=0.00 total=99\n"
    (tmp_path / "pressure/cpu").write_text(waits.format(2_000_000))
    now, waited = node.core_waits(tmp_path)
    assert waited == 2.0
    # Of the last 1000 s: 300 s, whatever the time that this test takes beside them.
    found = node.busy_since((now - 1000, waited - 300), tmp_path)
    assert found["load"] == 9.25
    assert 0.2 < found["core_wait_share"] <= 0.3
    assert node.busy_since((now - 1000, waited + 5), tmp_path)["core_wait_share"] == 0.0
