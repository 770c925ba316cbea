import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from partitioners import (
    BlockCost,
    DoesNotFitError,
    ModelCosts,
    PartitionError,
    RankSpec,
    TooManyStagesError,
    balanced,
    uniform,
)
from tests.partitioners import brute_force, strategies


def blocks_of(seconds: list[float], **costs: int) -> tuple[BlockCost, ...]:
    return tuple(BlockCost(each, **costs) for each in seconds)


@settings(deadline=None, max_examples=400)
@given(strategies.problems(memory_bytes=st.none()))
def test_equals_brute_force_in_bottleneck_and_every_tie_rule(problem: tuple[ModelCosts, list[RankSpec]]) -> None:
    costs, ranks = problem
    best = min(
        brute_force.all_counts(costs.num_blocks, len(ranks)),
        key=lambda counts: brute_force.preference(costs, ranks, counts),
    )
    found = balanced(costs, ranks)
    assert brute_force.preference(costs, ranks, found.counts) == brute_force.preference(costs, ranks, best)


@settings(deadline=None, max_examples=400)
@given(strategies.problems(memory_bytes=st.one_of(st.none(), st.integers(0, 60))))
def test_equals_brute_force_under_memory_limits(problem: tuple[ModelCosts, list[RankSpec]]) -> None:
    costs, ranks = problem
    every = list(brute_force.all_counts(costs.num_blocks, len(ranks)))
    fitting = [counts for counts in every if not any(brute_force.lacking(costs, ranks, counts))]
    if fitting:
        best = min(brute_force.preference(costs, ranks, counts) for counts in fitting)
        found = balanced(costs, ranks)
        assert not any(found.shortfalls(costs, ranks))
        assert brute_force.preference(costs, ranks, found.counts) == best
    else:
        with pytest.raises(DoesNotFitError) as caught:
            balanced(costs, ranks)
        smallest_shortfall = min(max(brute_force.lacking(costs, ranks, counts)) for counts in every)
        assert max(caught.value.shortfalls) == smallest_shortfall
        assert list(caught.value.shortfalls) == brute_force.lacking(costs, ranks, caught.value.counts)


@settings(deadline=None, max_examples=200)
@given(
    seconds=st.lists(st.floats(1e-4, 10.0), min_size=3, max_size=7),
    speeds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=3),
)
def test_equals_brute_force_on_arbitrary_floats(seconds: list[float], speeds: list[float]) -> None:
    costs = ModelCosts(blocks_of(seconds))
    ranks = [RankSpec(speed=speed) for speed in speeds]
    every = brute_force.all_counts(costs.num_blocks, len(ranks))
    smallest = min(brute_force.busiest(costs, ranks, counts) for counts in every)
    assert balanced(costs, ranks).bottleneck(costs, ranks) == pytest.approx(smallest, rel=1e-8)


@settings(deadline=None)
@given(strategies.problems(memory_bytes=st.none(), max_stages=6))
def test_is_never_slower_than_uniform(problem: tuple[ModelCosts, list[RankSpec]]) -> None:
    costs, ranks = problem
    assert balanced(costs, ranks).bottleneck(costs, ranks) <= uniform(costs, ranks).bottleneck(costs, ranks)


@settings(deadline=None, max_examples=60)
@given(
    num_blocks=st.integers(1, 64),
    num_stages=st.integers(1, 16),
    seconds=st.floats(1e-3, 1.0),
    boundary_bytes=st.integers(0, 10**9),
)
def test_splits_equal_blocks_on_equal_ranks_as_uniform_does(
    num_blocks: int, num_stages: int, seconds: float, boundary_bytes: int
) -> None:
    assume(num_stages <= num_blocks)
    costs = ModelCosts.uniform(num_blocks, seconds=seconds, boundary_bytes=boundary_bytes)
    ranks = [RankSpec()] * num_stages
    assert balanced(costs, ranks) == uniform(costs, ranks)


def test_faster_ranks_get_more_blocks() -> None:
    assert balanced(ModelCosts.uniform(30), [RankSpec(speed=2.0), RankSpec(speed=1.0)]).counts == (20, 10)


def test_prologue_and_epilogue_take_blocks_from_the_outer_stages() -> None:
    blocks = blocks_of([1.0] * 12)
    costs = ModelCosts(blocks, prologue=BlockCost(2.0), epilogue=BlockCost(1.0))
    assert balanced(costs, [RankSpec()] * 3).counts == (3, 5, 4)


def test_a_rank_with_a_high_fixed_cost_stays_empty() -> None:
    assert balanced(ModelCosts.uniform(8), [RankSpec(), RankSpec(), RankSpec(fixed_seconds=4.5)]).counts == (4, 4, 0)


def test_a_tie_leaves_no_rank_empty() -> None:
    # 4,4,0 and 3,4,1 are both done after 4 seconds.
    assert balanced(ModelCosts.uniform(8), [RankSpec(), RankSpec(), RankSpec(fixed_seconds=3.0)]).counts == (3, 4, 1)


def test_ties_of_rounded_sums_are_still_ties() -> None:
    # Sums of 0.1 differ in their last bits depending on where they start, so that among equal runs one looks shortest.
    costs = ModelCosts.uniform(57, seconds=0.1)
    assert balanced(costs, [RankSpec()] * 4).counts == (14, 14, 15, 14)


def test_a_tie_goes_to_the_cut_that_fewer_bytes_cross() -> None:
    # 1,2 and 2,1 both take 2 seconds.
    blocks = (BlockCost(1.0, boundary_bytes=5), BlockCost(1.0, boundary_bytes=4), BlockCost(1.0))
    assert balanced(ModelCosts(blocks), [RankSpec()] * 2).counts == (2, 1)
    blocks = (BlockCost(1.0, boundary_bytes=4), BlockCost(1.0, boundary_bytes=5), BlockCost(1.0))
    assert balanced(ModelCosts(blocks), [RankSpec()] * 2).counts == (1, 2)


def test_a_slow_link_moves_the_cut_to_a_smaller_boundary() -> None:
    blocks = tuple(BlockCost(1.0, boundary_bytes=num_bytes) for num_bytes in (1000, 10, 1000, 0))
    ranks = [RankSpec(link_bytes_per_second=100.0), RankSpec()]
    assert balanced(ModelCosts(blocks), ranks).counts == (2, 2)
    blocks = tuple(BlockCost(1.0, boundary_bytes=num_bytes) for num_bytes in (10, 1000, 1000, 0))
    assert balanced(ModelCosts(blocks), ranks).counts == (1, 3)


def test_a_small_rank_gets_fewer_blocks_than_its_speed_allows() -> None:
    costs = ModelCosts.uniform(10, parameter_bytes=100, activation_bytes=50)
    ranks = [RankSpec(memory_bytes=349), RankSpec(memory_bytes=10_000)]
    assert balanced(costs, ranks).counts == (2, 8)


def test_fixed_and_replicated_bytes_count_against_the_memory_limit() -> None:
    costs = ModelCosts(blocks_of([1.0] * 4, parameter_bytes=100), replicated_bytes=50)
    assert balanced(costs, [RankSpec(memory_bytes=250), RankSpec(memory_bytes=350)]).counts == (2, 2)
    with_vae = [RankSpec(memory_bytes=250, fixed_bytes=1), RankSpec(memory_bytes=350)]
    assert balanced(costs, with_vae).counts == (1, 3)


def test_does_not_fit_names_what_each_rank_lacks_and_how_many_ranks_would_do() -> None:
    costs = ModelCosts.uniform(6, parameter_bytes=2**30)
    with pytest.raises(DoesNotFitError) as caught:
        balanced(costs, [RankSpec(memory_bytes=3 * 2**29)] * 2)
    error = caught.value
    assert error.counts == (3, 3)
    assert error.shortfalls == (3 * 2**29, 3 * 2**29)
    assert error.smallest_num_ranks == 6
    assert "rank 0 lacks 1610612736 bytes (1.50 GiB)" in str(error)
    assert "at least 6 ranks" in str(error)


def test_does_not_fit_names_only_the_ranks_that_lack_memory() -> None:
    costs = ModelCosts(blocks_of([1.0] * 2, parameter_bytes=10))
    with pytest.raises(DoesNotFitError, match="rank 1 lacks 5 bytes") as caught:
        balanced(costs, [RankSpec(memory_bytes=10), RankSpec(memory_bytes=5)])
    assert "rank 0" not in str(caught.value)


def test_no_number_of_ranks_is_named_when_one_block_is_too_large() -> None:
    blocks = (BlockCost(1.0, 5), BlockCost(1.0, 500), BlockCost(1.0, 5))
    with pytest.raises(DoesNotFitError) as caught:
        balanced(ModelCosts(blocks), [RankSpec(memory_bytes=100)] * 2)
    assert caught.value.smallest_num_ranks is None


def test_where_ranks_differ_those_that_are_added_are_like_the_largest() -> None:
    with pytest.raises(DoesNotFitError, match="use at least 4 ranks, those that are added like the largest") as caught:
        balanced(ModelCosts.uniform(7, parameter_bytes=10), [RankSpec(memory_bytes=10), RankSpec(memory_bytes=20)])
    assert caught.value.smallest_num_ranks == 4


@settings(deadline=None, max_examples=300)
@given(strategies.model_costs(min_blocks=2), st.integers(0, 40), st.integers(0, 4))
def test_the_named_number_of_ranks_is_the_smallest_that_fits(
    costs: ModelCosts, memory_bytes: int, fixed_bytes: int
) -> None:
    rank = RankSpec(memory_bytes=memory_bytes, fixed_bytes=fixed_bytes)
    fits = [
        num_ranks
        for num_ranks in range(1, costs.num_blocks + 1)
        if not all(
            any(brute_force.lacking(costs, [rank] * num_ranks, counts))
            for counts in brute_force.all_counts(costs.num_blocks, num_ranks)
        )
    ]
    assume(1 not in fits)
    with pytest.raises(DoesNotFitError) as caught:
        balanced(costs, [rank])
    assert caught.value.smallest_num_ranks == min(fits, default=None)


def test_more_stages_than_blocks_is_an_error() -> None:
    with pytest.raises(TooManyStagesError, match="3 stages are more than the model's 2 blocks"):
        balanced(ModelCosts.uniform(2), [RankSpec()] * 3)


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(PartitionError, match="no ranks"):
        balanced(ModelCosts.uniform(2), [])


def test_one_rank_takes_everything() -> None:
    costs = ModelCosts(blocks_of([1.0, 2.0]), prologue=BlockCost(3.0), epilogue=BlockCost(4.0))
    partition = balanced(costs, [RankSpec(speed=2.0)])
    assert partition.counts == (2,)
    assert math.isclose(partition.bottleneck(costs, [RankSpec(speed=2.0)]), 5.0)


def test_large_models_are_solved_too() -> None:
    costs = ModelCosts(blocks_of([1.0 + block % 7 for block in range(128)], parameter_bytes=10))
    ranks = [RankSpec(speed=1.0 + stage % 3, memory_bytes=150) for stage in range(16)]
    partition = balanced(costs, ranks)
    assert partition.num_blocks == 128
    assert max(partition.stage_bytes(costs, ranks)) <= 150
    assert partition.bottleneck(costs, ranks) < uniform(costs, ranks).bottleneck(costs, ranks)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), num_blocks=st.integers(8, 64), num_stages=st.integers(1, 8))
def test_is_never_slower_than_a_uniform_split_that_fits(data: st.DataObject, num_blocks: int, num_stages: int) -> None:
    def lists(element: st.SearchStrategy[float], size: int) -> list[float]:
        return data.draw(st.lists(element, min_size=size, max_size=size))

    seconds, sizes = lists(st.floats(1e-3, 1.0), num_blocks), lists(st.integers(0, 100), num_blocks)
    costs = ModelCosts(
        tuple(BlockCost(own, int(size), boundary_bytes=int(size)) for own, size in zip(seconds, sizes, strict=True))
    )
    speeds, fixed = lists(st.floats(0.2, 4.0), num_stages), lists(st.floats(0.0, 5.0), num_stages)
    memory = data.draw(st.integers(sum(map(int, sizes)) // num_stages, 2 * sum(map(int, sizes)) // num_stages + 200))
    ranks = [
        RankSpec(speed, memory, fixed_seconds=besides, link_bytes_per_second=100.0)
        for speed, besides in zip(speeds, fixed, strict=True)
    ]
    even = uniform(costs, ranks)
    if any(even.shortfalls(costs, ranks)):
        return
    found = balanced(costs, ranks)
    assert not any(found.shortfalls(costs, ranks))
    assert found.bottleneck(costs, ranks) <= even.bottleneck(costs, ranks) * (1 + 1e-9)
