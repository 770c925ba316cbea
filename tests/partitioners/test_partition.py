import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioners import (
    BlockCost,
    CountsNotIntegersError,
    EmptyStageError,
    ModelCosts,
    NegativeCountError,
    Partition,
    PartitionError,
    RankSpec,
    WrongNumberOfCountsError,
    WrongSumError,
)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_ranges_cover_every_block_once_and_in_order(counts: list[int]) -> None:
    partition = Partition(tuple(counts), allow_empty=True)
    owned = [(stage, block) for stage, (start, end) in enumerate(partition.ranges) for block in range(start, end)]
    assert [block for _, block in owned] == list(range(partition.num_blocks))
    assert [partition.stage_of(block) for _, block in owned] == [stage for stage, _ in owned]
    assert [end - start for start, end in partition.ranges] == counts


def test_sizes_are_known() -> None:
    partition = Partition((7, 8, 8, 7))
    assert (partition.num_stages, partition.num_blocks) == (4, 30)
    assert partition.ranges == [(0, 7), (7, 15), (15, 23), (23, 30)]
    assert str(partition) == "7,8,8,7"


@pytest.mark.parametrize("block", [-1, 30])
def test_stage_of_a_block_that_does_not_exist_is_an_error(block: int) -> None:
    with pytest.raises(PartitionError, match=f"no block {block}; this partition has blocks 0 to 29"):
        Partition((15, 15)).stage_of(block)


def test_empty_stages_exist_only_where_asked_for() -> None:
    with pytest.raises(EmptyStageError, match="stage 1 has no blocks"):
        Partition((1, 0, 1))
    assert Partition((1, 0, 1), allow_empty=True).counts == (1, 0, 1)


def test_how_a_partition_was_made_does_not_change_what_it_equals() -> None:
    assert Partition((1, 1), allow_empty=True) == Partition((1, 1))
    assert len({Partition((1, 1), allow_empty=True), Partition((1, 1))}) == 1


def test_counts_given_as_a_list_become_a_tuple() -> None:
    assert Partition([1, 2]).counts == (1, 2)  # type: ignore[arg-type]


def test_invalid_counts_are_refused() -> None:
    with pytest.raises(NegativeCountError):
        Partition((3, -1))
    with pytest.raises(CountsNotIntegersError):
        Partition((3, 1.5))  # type: ignore[arg-type]
    with pytest.raises(PartitionError, match="no block counts"):
        Partition(())


def test_stage_seconds_count_compute_over_speed_fixed_seconds_and_transfer() -> None:
    blocks = tuple(BlockCost(2.0, boundary_bytes=100) for _ in range(4))
    costs = ModelCosts(blocks, prologue=BlockCost(1.0), epilogue=BlockCost(3.0))
    ranks = [
        RankSpec(speed=2.0, fixed_seconds=0.5, link_bytes_per_second=50.0, link_latency_seconds=0.25),
        RankSpec(link_bytes_per_second=1.0, link_latency_seconds=9.0),  # the last rank sends nothing
    ]
    partition = Partition((1, 3))
    assert partition.stage_seconds(costs, ranks) == [3.0 / 2.0 + 0.5 + 2.0 + 0.25, 6.0 + 3.0]
    assert partition.bottleneck(costs, ranks) == 9.0


def test_empty_stages_relay_what_they_received() -> None:
    costs = ModelCosts((BlockCost(1.0, boundary_bytes=10),), prologue=BlockCost(0.0, boundary_bytes=30))
    ranks = [RankSpec(link_bytes_per_second=10.0)] * 3
    assert Partition((0, 1, 0), allow_empty=True).stage_seconds(costs, ranks) == [3.0, 2.0, 0.0]
    assert Partition((0, 0, 1), allow_empty=True).stage_seconds(costs, ranks) == [3.0, 3.0, 1.0]


def test_stage_bytes_count_weights_and_the_largest_activation() -> None:
    blocks = (BlockCost(1.0, 10, 7), BlockCost(1.0, 20, 3), BlockCost(1.0, 30, 5))
    costs = ModelCosts(blocks, prologue=BlockCost(0.0, 1, 9), epilogue=BlockCost(0.0, 2, 4), replicated_bytes=100)
    ranks = [RankSpec(memory_bytes=130), RankSpec(fixed_bytes=1000)]
    partition = Partition((2, 1))
    assert partition.stage_bytes(costs, ranks) == [10 + 20 + 1 + 100 + 9, 30 + 2 + 100 + 5 + 1000]
    assert partition.shortfalls(costs, ranks) == [10, 0]


def test_a_single_stage_runs_prologue_and_epilogue() -> None:
    costs = ModelCosts((BlockCost(1.0, 10),), prologue=BlockCost(2.0, 20), epilogue=BlockCost(4.0, 40))
    assert Partition((1,)).stage_seconds(costs, [RankSpec()]) == [7.0]
    assert Partition((1,)).stage_bytes(costs, [RankSpec()]) == [70]


def test_costs_of_another_model_are_refused() -> None:
    partition = Partition((2, 2))
    with pytest.raises(WrongSumError, match="expected 5, the model's number of blocks"):
        partition.stage_seconds(ModelCosts.uniform(5), [RankSpec()] * 2)
    with pytest.raises(WrongNumberOfCountsError, match="expected 3, one per stage"):
        partition.stage_bytes(ModelCosts.uniform(4), [RankSpec()] * 3)


def test_a_partition_survives_pickling() -> None:
    partition = Partition((1, 0, 1), allow_empty=True)
    assert pickle.loads(pickle.dumps(partition)) == partition
