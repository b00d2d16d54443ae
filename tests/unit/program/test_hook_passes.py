"""Which batches the start-up hook takes for a step's work, without torch."""

from unittest.mock import Mock

import pytest

from jobkit.program.hook import Hook, Pass


@pytest.mark.parametrize("idle", [0, None])  # None: of a meter that has failed
def test_a_batch_given_without_gradients_is_no_work_though_its_loader_goes_on(idle) -> None:
    """As where a program validates one batch before each step."""
    own, iterators = Hook({}), [Mock(), Mock()]
    own.meter = Mock(idle=lambda: idle)
    evaluation, training = (Pass(iterator, 0.0, 0.0) for iterator in iterators)
    for now in range(10):
        for here, gradients in ((evaluation, False), (training, True)):
            own.asks(here, now, gradients)
            here.size += 8
        own.step(now + 0.5)
    assert [call.args[0] for call in own.meter.step.call_args_list] == [8] * 10
    assert own.meter.exclude.call_count == 10
