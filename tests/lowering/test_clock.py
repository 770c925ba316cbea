import time

import pytest
import torch

from dit_pipelining.capture.capturing import capture
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.lowering.clock import FEWEST_CALLS, StageClock
from tests.capture.toy import DIM, Toy, randn


class Line(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](hidden_states))


@pytest.fixture(scope="module")
def graphs() -> tuple[BlockGraph, BlockGraph]:
    model = Line(2)
    small, large = (capture(model, dict(hidden_states=randn(2, tokens, DIM))) for tokens in (4, 8))
    return small, large


def call(clock: StageClock, graph: BlockGraph, seconds: float, times: int) -> None:
    for _ in range(times):
        with clock.measured(graph):
            time.sleep(seconds)


def test_no_time_is_given_before_there_are_enough_calls(graphs: tuple[BlockGraph, BlockGraph]) -> None:
    clock = StageClock(torch.device("cpu"))
    call(clock, graphs[0], 0.0, FEWEST_CALLS - 1)
    assert clock.seconds_per_call() is None
    call(clock, graphs[0], 0.0, 1)
    assert clock.seconds_per_call() is not None
    clock.reset()
    assert clock.seconds_per_call() is None


def test_a_slow_first_call_does_not_count_and_graphs_count_as_often_as_they_were_called(
    graphs: tuple[BlockGraph, BlockGraph],
) -> None:
    clock = StageClock(torch.device("cpu"))
    call(clock, graphs[0], 0.5, 1)
    call(clock, graphs[0], 0.01, 5)
    call(clock, graphs[1], 0.1, 2)
    seconds = clock.seconds_per_call()
    assert seconds is not None
    assert seconds == pytest.approx((6 * 0.01 + 2 * 0.1) / 8, rel=0.5)


def test_a_call_that_fails_is_no_time(graphs: tuple[BlockGraph, BlockGraph]) -> None:
    clock = StageClock(torch.device("cpu"))
    for _ in range(FEWEST_CALLS):
        with pytest.raises(ZeroDivisionError), clock.measured(graphs[0]):
            raise ZeroDivisionError
    assert clock.seconds_per_call() is None
