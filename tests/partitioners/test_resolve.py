from collections.abc import Sequence

import pytest

from partitioners import (
    PARTITIONERS,
    CountsNotIntegersError,
    ModelCosts,
    Partition,
    RankSpec,
    UnknownPartitionerError,
    WrongNumberOfCountsError,
    WrongSumError,
    balanced,
    resolve_partition,
    uniform,
)

COSTS = ModelCosts.uniform(40)
RANKS = [RankSpec(speed=3.0), RankSpec(speed=1.0)]
ENVIRONMENT = {"VLLM_PP_LAYER_PARTITION": "15,25"}


def test_an_argument_beats_the_environment() -> None:
    assert resolve_partition("uniform", COSTS, RANKS, counts=[10, 30], environment=ENVIRONMENT).counts == (10, 30)


def test_the_environment_beats_the_default() -> None:
    assert resolve_partition("uniform", COSTS, RANKS, environment=ENVIRONMENT).counts == (15, 25)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,39")
    assert resolve_partition("uniform", COSTS, RANKS).counts == (1, 39)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_names_stand_for_partitioners(name: str) -> None:
    assert resolve_partition(name, COSTS, RANKS, environment={}) == PARTITIONERS[name](COSTS, RANKS)


def test_uniform_and_balanced_have_names() -> None:
    assert PARTITIONERS["uniform"] is uniform
    assert PARTITIONERS["balanced"] is balanced
    assert resolve_partition("uniform", COSTS, RANKS, environment={}).counts == (20, 20)
    assert resolve_partition("balanced", COSTS, RANKS, environment={}).counts == (30, 10)


def test_a_function_is_a_partitioner() -> None:
    def all_on_the_first(costs: ModelCosts, ranks: Sequence[RankSpec]) -> Partition:
        return Partition((costs.num_blocks, *[0] * (len(ranks) - 1)), allow_empty=True)

    assert resolve_partition(all_on_the_first, COSTS, RANKS, environment={}).counts == (40, 0)


def test_a_function_that_loses_blocks_is_named() -> None:
    def forgetful(costs: ModelCosts, ranks: Sequence[RankSpec]) -> Partition:
        return Partition((1,) * len(ranks))

    with pytest.raises(WrongSumError, match=r"from the partitioner 'forgetful': they sum to 2; expected 40"):
        resolve_partition(forgetful, COSTS, RANKS, environment={})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPartitionerError, match=r"no partitioner 'even'; use one of 'uniform', 'balanced'"):
        resolve_partition("even", COSTS, RANKS, environment={})


def test_errors_name_where_the_counts_came_from() -> None:
    with pytest.raises(WrongSumError, match=r"from the argument: they sum to 3"):
        resolve_partition("uniform", COSTS, RANKS, counts="1,2", environment=ENVIRONMENT)
    with pytest.raises(WrongNumberOfCountsError, match="from the environment variable VLLM_PP_LAYER_PARTITION"):
        resolve_partition("uniform", COSTS, RANKS, environment={"VLLM_PP_LAYER_PARTITION": "40"})
    with pytest.raises(CountsNotIntegersError, match="from the environment variable VLLM_PP_LAYER_PARTITION"):
        resolve_partition("uniform", COSTS, RANKS, environment={"VLLM_PP_LAYER_PARTITION": "half,half"})
