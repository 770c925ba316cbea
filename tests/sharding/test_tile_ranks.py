"""Which rank takes which tile."""

import math
from itertools import product

import diffusers
import pytest

from dit_pipelining.sharding.tile_ranks import WIDEST_PACE, assign_tiles, can_spread, usable_paces


def slowest(costs: list[float], paces: list[float], chosen: list[int]) -> float:
    return max(
        sum(cost for cost, own in zip(costs, chosen, strict=True) if own == rank) * pace
        for rank, pace in enumerate(paces)
    )


def test_equal_tiles_go_round_and_the_last_stays() -> None:
    chosen = assign_tiles([1.0] * 7, [1.0, 1.0, 1.0])
    assert sorted(chosen.count(rank) for rank in range(3)) == [2, 2, 3]
    assert chosen[-1] == 0


def test_a_rank_twice_as_fast_takes_twice_as_many() -> None:
    chosen = assign_tiles([1.0] * 9, [1.0, 0.5])
    assert (chosen.count(0), chosen.count(1)) == (3, 6)


@pytest.mark.parametrize("costs", [[5.0, 4.0, 3.0, 3.0, 3.0, 1.0], [9.0, 9.0, 4.5, 4.5, 2.0], [8.0, 1.0], [3.0]])
@pytest.mark.parametrize("paces", [[1.0, 1.0], [1.0, 0.5, 2.0]])
def test_no_choice_is_much_better(costs: list[float], paces: list[float]) -> None:
    chosen = assign_tiles(costs, paces)
    others = product(range(len(paces)), repeat=len(costs) - 1)
    best = min(slowest(costs, paces, [*choice, 0]) for choice in others)
    assert slowest(costs, paces, chosen) <= 4 / 3 * best


def test_fewer_tiles_than_ranks_leave_ranks_out() -> None:
    assert sorted(assign_tiles([2.0, 1.0], [1.0] * 4)) == [0, 1]


def test_paces_that_are_not_measured_count_as_the_slowest_known_and_none_counts_as_hopeless() -> None:
    assert usable_paces([math.inf, math.inf]) == [1.0, 1.0]
    assert usable_paces([2.0, math.inf, 1.0]) == [2.0, 2.0, 1.0]
    assert usable_paces([1.0, 100.0]) == [1.0, WIDEST_PACE]


def test_vaes_whose_layers_keep_state_are_left_alone() -> None:
    assert can_spread(diffusers.AutoencoderKLWan)
    assert can_spread(diffusers.AutoencoderKLFlux2)
    assert not can_spread(diffusers.AutoencoderKLMagvit)
    assert not can_spread(diffusers.AutoencoderVidTok)
    assert not can_spread(diffusers.AutoencoderTiny)
