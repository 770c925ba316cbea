"""Replicas that have nothing to do are told once."""

import warnings

import pytest

from dit_pipelining.runtime.idle import LONELY_CALLS, IdleReplicas
from dit_pipelining.runtime.turns import Turns


def warned(replicas: int, parts: int, branches: int) -> list[str]:
    """The warnings of ten steps, each with `branches` calls in `parts` parts."""
    turns, watch = Turns(), IdleReplicas("transformer", replicas)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            for _ in range(branches):
                watch.see(turns, parts)
                turns.current().submitted += parts
            turns.end_turn()
    return [str(warning.message) for warning in caught]


def test_one_call_a_step_with_nothing_to_cut_warns_once() -> None:
    [message] = warned(replicas=2, parts=1, branches=1)
    assert "1 of 2 replicas idle" in message
    assert LONELY_CALLS < 10


@pytest.mark.parametrize(("replicas", "parts", "branches"), [(2, 2, 1), (2, 1, 2), (1, 1, 1), (2, 1, 3)])
def test_replicas_that_share_the_work_do_not_warn(replicas: int, parts: int, branches: int) -> None:
    assert warned(replicas, parts, branches) == []
