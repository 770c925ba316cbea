"""New partitions from measured stage times."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioners import (
    BlockCost,
    BlockScheduler,
    InvalidCostError,
    ModelCosts,
    Partition,
    RankSpec,
    WrongSumError,
)


def scheduler(counts: tuple[int, ...], **options: float) -> BlockScheduler:
    partition = Partition(counts, allow_empty=True)
    return BlockScheduler(ModelCosts.uniform(sum(counts)), [RankSpec()] * len(counts), partition, **options)


def test_blocks_leave_a_stage_that_takes_too_long() -> None:
    found = scheduler((4, 4)).collect_timing_and_rebalance([3.0, 1.0])
    assert found is not None
    assert found.counts == (2, 6)


def test_balanced_stages_stay_as_they_are() -> None:
    assert scheduler((4, 4)).collect_timing_and_rebalance([1.0, 1.05]) is None


def test_a_gain_below_the_threshold_moves_nothing() -> None:
    times = [1.25, 1.0]  # 10 blocks: 4,6 would take 1.2
    assert scheduler((5, 5)).collect_timing_and_rebalance(times) is None
    moved = scheduler((5, 5), minimum_gain=0.04).collect_timing_and_rebalance(times)
    assert moved is not None
    assert moved.counts == (4, 6)


@pytest.mark.parametrize("invalid", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_nothing_is_proposed_until_every_stage_has_a_valid_time(invalid: float | None) -> None:
    blocks = scheduler((4, 4))
    assert blocks.collect_timing_and_rebalance([3.0, invalid]) is None
    assert blocks.collect_timing_and_rebalance([3.0, 1.0]) is not None


def test_a_partition_that_was_measured_no_faster_is_not_proposed_again() -> None:
    # What is slow are the first two blocks, not the rank, which equal costs do not say.
    real = [3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    def measured(counts: Sequence[int]) -> list[float]:
        starts = [sum(counts[:stage]) for stage in range(len(counts))]
        return [sum(real[start : start + count]) for start, count in zip(starts, counts, strict=True)]

    blocks = scheduler((4, 4))
    seen = [blocks.partition.counts]
    for _ in range(10):
        if (found := blocks.collect_timing_and_rebalance(measured(blocks.partition.counts))) is not None:
            seen.append(found.counts)
    assert len(seen) <= 3
    assert len(set(seen)) == len(seen)


def test_with_another_attention_backend_the_question_is_open_again() -> None:
    blocks = scheduler((4, 4))
    assert blocks.collect_timing_and_rebalance([3.0, 1.0], attention_backend="native") == Partition((2, 6))
    # It turned out as slow, and the way back was measured to be no better.
    assert blocks.collect_timing_and_rebalance([1.0, 3.0], attention_backend="native") is None
    assert blocks.collect_timing_and_rebalance([1.0, None], attention_backend="flash") is None
    assert blocks.collect_timing_and_rebalance([1.0, 3.0], attention_backend="flash") == Partition((4, 4))


def test_what_a_rank_does_besides_is_not_taken_for_a_slow_rank() -> None:
    ranks = [RankSpec(fixed_seconds=4.0), RankSpec()]
    blocks = BlockScheduler(ModelCosts.uniform(12), ranks, Partition((4, 8)))
    assert blocks.collect_timing_and_rebalance([4.0, 8.0]) is None


def test_an_empty_stage_tells_nothing_about_its_rank() -> None:
    blocks = scheduler((4, 4, 0))
    found = blocks.collect_timing_and_rebalance([4.0, 4.0, 1e-5])
    assert found is not None
    assert found.counts == (3, 3, 2)


def test_a_wrong_number_of_times_is_an_error() -> None:
    with pytest.raises(InvalidCostError, match="2 times, one per stage"):
        scheduler((4, 4)).collect_timing_and_rebalance([1.0])


def test_a_partition_of_another_model_is_an_error() -> None:
    with pytest.raises(WrongSumError):
        BlockScheduler(ModelCosts.uniform(9), [RankSpec()] * 2, Partition((4, 4)))
    with pytest.raises(InvalidCostError, match="minimum_gain"):
        scheduler((4, 4), minimum_gain=-1.0)


@settings(deadline=None)
@given(
    seconds=st.lists(st.floats(0.1, 2.0), min_size=4, max_size=16),
    speeds=st.lists(st.floats(0.25, 4.0), min_size=2, max_size=4),
)
def test_with_slow_ranks_it_settles_after_one_move(seconds: list[float], speeds: list[float]) -> None:
    costs = ModelCosts(tuple(map(BlockCost, seconds)))
    real = [RankSpec(speed=speed) for speed in speeds]
    first = Partition((len(seconds) - len(speeds) + 1, *[1] * (len(speeds) - 1)))
    blocks = BlockScheduler(costs, [RankSpec()] * len(speeds), first)
    found = blocks.collect_timing_and_rebalance(first.stage_seconds(costs, real))
    if found is not None:
        before, after = first.bottleneck(costs, real), found.bottleneck(costs, real)
        assert before >= after * 1.1 * (1 - 1e-9)
        if 0 not in found.counts:
            assert blocks.collect_timing_and_rebalance(found.stage_seconds(costs, real)) is None
