"""Requests take turns in a fixed ring, one at a time, and end together when one fails."""

import threading
from collections.abc import Callable

import pytest
import torch

from dit_pipelining.runtime.turns import Turns


def steps_of(turns: Turns, index: int, steps: int, events: list[tuple[int, int]]) -> Callable[[], int]:
    """A request that submits one call and waits for it, a number of times."""

    def request() -> int:
        for step in range(steps):
            events.append((index, step))
            turns.current().submitted += 1
            turns.end_turn()
        return index

    return request


def test_turns_go_around_and_skip_requests_that_have_ended() -> None:
    turns = Turns()
    events: list[tuple[int, int]] = []
    assert turns.run([steps_of(turns, index, steps, events) for index, steps in enumerate((3, 1, 2))]) == [0, 1, 2]
    assert events == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]


def test_nothing_to_run_gives_nothing() -> None:
    assert Turns().run([]) == []


def test_a_request_beyond_the_limit_starts_when_another_has_ended() -> None:
    turns = Turns()
    events: list[tuple[int, int]] = []
    turns.run([steps_of(turns, index, 2, events) for index in range(3)], in_flight=2)
    assert events == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


def test_a_wait_without_a_call_since_the_last_turn_keeps_the_turn() -> None:
    turns = Turns()
    events: list[str] = []

    def two_branches(name: str) -> None:
        turns.current().submitted += 2
        turns.end_turn()
        events.append(f"{name} first")
        turns.end_turn()
        events.append(f"{name} second")

    turns.run([lambda: two_branches("a"), lambda: two_branches("b")])
    assert events == ["a first", "a second", "b first", "b second"]


def test_random_numbers_are_a_requests_own() -> None:
    turns = Turns()

    def draw() -> list[float]:
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(()).item())
            turns.current().submitted += 1
            turns.end_turn()
        return drawn

    torch.manual_seed(0)
    alone = [torch.rand(()).item() for _ in range(3)]
    torch.manual_seed(0)
    assert turns.run([draw] * 4) == [alone] * 4


def test_an_error_ends_all_requests_with_its_own_type() -> None:
    turns = Turns()
    events: list[tuple[int, int]] = []

    def fail() -> None:
        raise KeyError("stopped")

    with pytest.raises(KeyError, match="stopped"):
        turns.run([steps_of(turns, 0, 100, events), fail, steps_of(turns, 2, 100, events)])
    assert len(events) == 1  # the first one's first step
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("request ")]
