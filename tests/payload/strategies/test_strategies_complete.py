"""Every strategy has all that the commands ask of it; one that lacks a member cannot be made."""

import math

import pytest

from jobkit.checks.verify.cases import CASES
from jobkit.payload.strategies import Strategy, strategy_class
from jobkit.planner.footprints import Subject, footprint, label_of, strategy_of, variants
from jobkit.planner.traffic import links, step_messages, step_s
from jobkit.spec import runspec
from jobkit.spec.runspec import SETTINGS, RunSpec
from jobkit.spec.strategies import FACTS, Facts
from jobkit.spec.traffic import Message, ModelSize

BASE = RunSpec(model="mlp", nodes=2, ranks_per_node=1)
MODES = {**variants(BASE), **variants(RunSpec(model="mlp", nodes=2, ranks_per_node=2))}
SIZE = ModelSize(parameters=4000, boundary=100.0, microbatches=2, stage=2000)


def test_the_table_is_what_every_part_knows() -> None:
    assert tuple(FACTS) == runspec.STRATEGIES
    assert len({strategy_class(name) for name in FACTS}) == len(FACTS)


@pytest.mark.parametrize("name", runspec.STRATEGIES)
def test_a_strategy_is_complete(name: str) -> None:
    facts, modes = FACTS[name], {k: s for k, s in MODES.items() if s.strategy == name}
    assert facts.name == name and modes
    assert facts.refuses.keys() <= set(SETTINGS)
    assert all(any(s.startswith(own) for s in SETTINGS) for own in facts.owns)
    assert [case for case in CASES if case.strategy == name]
    for label, spec in modes.items():
        assert label_of(spec) == label
        assert isinstance(strategy_of(spec), strategy_class(name))
        sent = facts.messages(spec.to_dict(), SIZE)
        assert sent is not None and all(isinstance(one, Message) for one in sent)
        assert bool(sent) != facts.one_rank
        if spec.world_size <= 3:  # the mlp has three layers
            each = footprint(spec, Subject())
            assert each.label == label and each.share.parameters > 0
            assert each.activations and each.communication is not None
            assert not math.isnan(step_s(step_messages(each, Subject()), links(10.0, 100.0)))


def test_one_that_says_nothing_of_its_traffic_or_its_buffers_cannot_be_made() -> None:
    class Silent(Facts):
        name, code, verified = "silent", "single.Single", ()

    class Bare(Strategy):
        def wrap(self, model):  # type: ignore[no-untyped-def]
            return model

    with pytest.raises(TypeError, match="messages"):
        Silent()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="communication_bytes"):
        Bare(None, None, None)  # type: ignore[abstract,arg-type]
