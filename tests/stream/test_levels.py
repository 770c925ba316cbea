"""Levels that change while a stream runs: the sequential reference with other levels from a chunk on."""

from typing import Any

import pytest
import torch

from dit_pipelining.stream.head import StreamInput
from dit_pipelining.stream.levels import HEADROOM, PATIENCE, AdaptiveLevels, nearest_levels
from dit_pipelining.stream.spec import StreamSpec
from tests.distributed import RankPool
from tests.stream import harness, reference

FOUR = (1.0, 0.8, 0.55, 0.3)
TWO = (1.0, 0.55)
CHUNKS = 9
CHANGES = {3: (TWO, [0, 2]), 6: (FOUR, [0, 0, 1, 1])}
"""By chunk: the levels from there on, and the old level whose keys and values each takes over."""


def spec(**more: Any) -> StreamSpec:
    return StreamSpec(**{**dict(levels=FOUR, frames_per_chunk=2, window=4, sinks=2), **more})


def script() -> harness.Script:
    return harness.Script({chunk: levels for chunk, (levels, _) in CHANGES.items()})


def expected(own: StreamSpec, changes: Any = None) -> list[torch.Tensor]:
    known = reference.Reference(reference.model(), own)
    return known.run(0, CHUNKS, {0: reference.text(10)}, reference.text(99), changes=changes or CHANGES)


@pytest.mark.parametrize("counts", [(4,), (1, 1, 2)])
def test_other_levels_are_the_reference_with_other_levels(counts: tuple[int, ...]) -> None:
    made = harness.stages(reference.model(), spec(), counts, batched=False)
    (chunks,), _ = harness.run(made, [[StreamInput()] * CHUNKS], script())
    assert made[0].spec.levels == FOUR
    assert all(torch.equal(one, other) for one, other in zip(chunks, expected(spec()), strict=True))
    wrong = {**CHANGES, 6: (FOUR, [0, 1, 1, 1])}
    assert not torch.equal(chunks[6], expected(spec(), wrong)[6])


def test_the_pass_over_clean_chunks_goes_on_with_its_context() -> None:
    own = spec(policy="clean")
    made = harness.stages(reference.model(), own, (1, 3), batched=False)
    (chunks,), _ = harness.run(made, [[StreamInput()] * CHUNKS], script())
    same = {chunk: (levels, [0] * len(levels)) for chunk, (levels, _) in CHANGES.items()}
    assert all(torch.equal(one, other) for one, other in zip(chunks, expected(own, same), strict=True))


def streamed(own: StreamSpec, counts: tuple[int, ...]) -> list[torch.Tensor]:
    rank = harness.rank(reference.model(), own, counts, [reference.text(10)])
    return [chunk.latents for chunk in rank.run([iter([StreamInput()] * CHUNKS)], script())]


@pytest.mark.parametrize(("own", "counts"), [(spec(), (1, 2, 1)), (spec(guidance_scale=2.0), (3, 1))])
def test_all_ranks_change_their_levels_at_the_same_chunk(
    ranks: RankPool, own: StreamSpec, counts: tuple[int, ...]
) -> None:
    size = len(counts) * own.branches
    chunks = ranks.run(size, streamed, own, counts)[len(counts) - 1]
    assert all(torch.equal(one, other) for one, other in zip(chunks, expected(own), strict=True))


def test_the_nearest_level_is_taken_over() -> None:
    assert nearest_levels(FOUR, TWO) == [0, 2]
    assert nearest_levels(TWO, FOUR) == [0, 0, 1, 1]
    assert nearest_levels((1.0, 0.5), (0.75,)) == [1]


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def after(levels: AdaptiveLevels, clock: Clock, chunks: int, seconds: float, busy: float, waited: bool = False) -> Any:
    """What is wanted after each of some chunks that start at an even pace."""
    found = []
    for _ in range(chunks):
        clock.time += seconds
        levels.started(waited)
        found.append(levels.wanted(busy))
    return [own for own in found if own is not None]


def test_levels_are_given_up_for_deadlines_and_taken_back_where_there_is_time() -> None:
    clock = Clock()
    levels = AdaptiveLevels(FOUR, 0.25, clock)
    assert after(levels, clock, PATIENCE, 0.3, 1.0) == []
    assert after(levels, clock, 1, 0.3, 1.0) == [(1.0, 0.8, 0.55)]
    assert after(levels, clock, 3 * PATIENCE, 0.3, 1.0) == [(1.0, 0.55), (1.0,)]  # the last one is not given up
    tight = HEADROOM * 0.25 / 0.2 / 2
    assert after(levels, clock, 6 * PATIENCE, 0.2, tight * 1.01) == []
    assert after(levels, clock, 1, 0.2, tight * 0.99) == [(1.0, 0.55)]


def test_a_source_that_is_late_costs_no_levels() -> None:
    clock = Clock()
    levels = AdaptiveLevels(FOUR, 0.25, clock)
    assert after(levels, clock, 6 * PATIENCE, 0.3, 0.5, waited=True) == []


def test_one_late_chunk_costs_no_levels() -> None:
    clock = Clock()
    levels = AdaptiveLevels(FOUR, 0.25, clock)
    for _ in range(10):
        assert after(levels, clock, 1, 0.9, 1.0) + after(levels, clock, PATIENCE - 1, 0.2, 1.0) == []
