"""Which ranks compute tiles, and who takes which."""

import math
from itertools import product

import diffusers
import pytest

from dit_pipelining.comm.layout import Layout
from dit_pipelining.sharding.tile_ranks import WIDEST_PACE, assign_tiles, can_spread, tile_ranks, usable_paces


def test_helpers_are_the_ranks_before_the_owner() -> None:
    ranks = tile_ranks(Layout(pipeline=4), rank=0, owner=3, size=3)
    assert ranks.compute == (3, 2, 1)
    assert ranks.owners == (3,)
    assert tile_ranks(Layout(pipeline=4), rank=2, owner=1, size=4).compute == (1, 0, 3, 2)


def test_owners_of_all_lines_compute_first_and_copies_stay_apart() -> None:
    layout = Layout(data=2, pipeline=2, ulysses=2)  # lines 0, 2 and 1, 3; the second copy from 4 on
    ranks = tile_ranks(layout, rank=0, owner=1, size=3)
    assert ranks.owners == (2, 3)
    assert ranks.compute == (2, 3, 1)
    assert tile_ranks(layout, rank=7, owner=1, size=2).compute == (6, 7)
    eight = tile_ranks(Layout(ring=2, ulysses=4), rank=5, owner=0, size=8)
    assert eight.compute == eight.owners == tuple(range(8))


def test_all_ranks_of_a_copy_agree() -> None:
    layout = Layout(cfg=2, pipeline=2, tensor=2)
    assert len({tile_ranks(layout, rank, owner=3, size=5) for rank in range(8)}) == 1


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
