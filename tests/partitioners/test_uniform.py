import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioners import ModelCosts, PartitionError, RankSpec, TooManyStagesError, uniform


def split(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    return uniform(ModelCosts.uniform(num_blocks), [RankSpec()] * num_stages).counts


@pytest.mark.parametrize(
    ("num_blocks", "counts"),
    [
        (30, (7, 8, 8, 7)),
        (40, (13, 14, 13)),
        (38, (13, 13, 12)),
        (57, (29, 28)),
        (57, (14, 14, 15, 14)),
        (40, (10, 10, 10, 10)),
        (7, (2, 2, 2, 1)),
        (5, (5,)),
    ],
)
def test_remainder_goes_to_the_middle_stages(num_blocks: int, counts: tuple[int, ...]) -> None:
    assert split(num_blocks, len(counts)) == counts


@given(st.integers(1, 200).flatmap(lambda blocks: st.tuples(st.just(blocks), st.integers(1, blocks))))
def test_counts_differ_by_at_most_one_and_the_last_is_never_larger(size: tuple[int, int]) -> None:
    num_blocks, num_stages = size
    counts = split(num_blocks, num_stages)
    assert sum(counts) == num_blocks
    assert len(counts) == num_stages
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


def test_more_stages_than_blocks_is_an_error() -> None:
    with pytest.raises(TooManyStagesError, match=r"5 stages .* 4 blocks; use at most 4 stages"):
        split(4, 5)


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(PartitionError, match="no ranks"):
        split(4, 0)
