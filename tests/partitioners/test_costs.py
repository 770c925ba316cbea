import math
from collections.abc import Callable

import pytest

from partitioners import BlockCost, InvalidCostError, ModelCosts, RankSpec


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: BlockCost(-1.0), "BlockCost.seconds"),
        (lambda: BlockCost(math.nan), "BlockCost.seconds"),
        (lambda: BlockCost(math.inf), "BlockCost.seconds"),
        (lambda: BlockCost("1"), "BlockCost.seconds"),  # type: ignore[arg-type]
        (lambda: BlockCost(1.0, parameter_bytes=-1), "BlockCost.parameter_bytes"),
        (lambda: BlockCost(1.0, activation_bytes=1.5), "BlockCost.activation_bytes"),  # type: ignore[arg-type]
        (lambda: BlockCost(1.0, boundary_bytes=-2), "BlockCost.boundary_bytes"),
        (lambda: BlockCost(1.0, flops=-3), "BlockCost.flops"),
        (lambda: ModelCosts(()), "ModelCosts.blocks"),
        (lambda: ModelCosts.uniform(0), "ModelCosts.blocks"),
        (lambda: ModelCosts.uniform(-1), "num_blocks"),
        (lambda: ModelCosts((BlockCost(1.0),), replicated_bytes=-1), "ModelCosts.replicated_bytes"),
        (lambda: RankSpec(speed=0.0), "RankSpec.speed"),
        (lambda: RankSpec(speed=-1.0), "RankSpec.speed"),
        (lambda: RankSpec(speed=math.nan), "RankSpec.speed"),
        (lambda: RankSpec(memory_bytes=-1), "RankSpec.memory_bytes"),
        (lambda: RankSpec(fixed_seconds=-0.1), "RankSpec.fixed_seconds"),
        (lambda: RankSpec(fixed_bytes=-1), "RankSpec.fixed_bytes"),
        (lambda: RankSpec(link_bytes_per_second=0.0), "RankSpec.link_bytes_per_second"),
        (lambda: RankSpec(link_latency_seconds=math.inf), "RankSpec.link_latency_seconds"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidCostError) as caught:
        make()
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} is {caught.value.value!r}; give ")


def test_whole_numbers_of_seconds_are_fine() -> None:
    assert BlockCost(1).seconds == 1
    assert RankSpec(speed=2, fixed_seconds=1).speed == 2


def test_uniform_models_have_equal_blocks_and_no_glue() -> None:
    costs = ModelCosts.uniform(3, seconds=0.5, parameter_bytes=1, activation_bytes=2, boundary_bytes=3, flops=4)
    assert costs.blocks == (BlockCost(0.5, 1, 2, 3, 4),) * 3
    assert costs.num_blocks == 3
    assert costs.prologue == costs.epilogue == BlockCost(0.0)


def test_blocks_given_as_a_list_become_a_tuple() -> None:
    costs = ModelCosts([BlockCost(1.0)])  # type: ignore[arg-type]
    assert costs.blocks == (BlockCost(1.0),)
    assert hash(costs) == hash(ModelCosts((BlockCost(1.0),)))


def test_boundary_bytes_are_those_of_the_block_before_the_cut() -> None:
    blocks = (BlockCost(1.0, boundary_bytes=10), BlockCost(1.0, boundary_bytes=20))
    costs = ModelCosts(blocks, prologue=BlockCost(0.0, boundary_bytes=5))
    assert [costs.boundary_bytes(end) for end in range(3)] == [5, 10, 20]


def test_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    assert RankSpec().transfer_seconds(10**9) == 0.0
    assert RankSpec(link_latency_seconds=0.5).transfer_seconds(10**9) == 0.5
    assert RankSpec(link_bytes_per_second=4.0, link_latency_seconds=0.5).transfer_seconds(8) == 2.5
