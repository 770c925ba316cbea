"""Layers of one stage."""

from typing import Any

import pytest
import torch
from torch import nn

from dit_pipelining.mixins import (
    PPMissingLayer,
    get_pp_indices,
    is_pp_missing_parameter,
    make_empty_intermediate_tensors_factory,
    make_layers,
)
from partitioners import (
    CountsNotIntegersError,
    Partition,
    TooManyStagesError,
    WrongNumberOfCountsError,
    WrongSumError,
)
from tests.distributed import RankPool
from tests.mixins.pipelines import on_groups


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (30, 4, [(0, 7), (7, 15), (15, 23), (23, 30)]),
        (40, 3, [(0, 13), (13, 27), (27, 40)]),
        (38, 3, [(0, 13), (13, 26), (26, 38)]),
        (4, 1, [(0, 4)]),
    ],
)
def test_the_remainder_goes_to_the_middle(layers: int, stages: int, expected: list[tuple[int, int]]) -> None:
    assert [get_pp_indices(layers, stage, stages) for stage in range(stages)] == expected


def test_the_environment_decides_and_an_argument_beats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5, 3")
    assert get_pp_indices(8, 1, 2) == (5, 8)
    assert get_pp_indices(8, 1, 2, Partition((2, 6))) == (2, 8)
    assert get_pp_indices(8, 1, 2, [1, 7]) == (1, 8)
    assert get_pp_indices(8, 1, 2, "0,8") == (0, 8)


@pytest.mark.parametrize(
    ("text", "error"), [("4,4,1", WrongNumberOfCountsError), ("4,5", WrongSumError), ("4,x", CountsNotIntegersError)]
)
def test_counts_that_do_not_fit_are_errors(monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception]) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", text)
    with pytest.raises(error):
        get_pp_indices(8, 0, 2)


def test_more_stages_than_layers_is_an_error() -> None:
    with pytest.raises(TooManyStagesError):
        get_pp_indices(2, 0, 3)


def test_one_process_gets_all_layers_with_their_names() -> None:
    names = []

    def layer(prefix: str) -> nn.Module:
        names.append(prefix)
        return nn.Linear(2, 2)

    start, end, layers = make_layers(3, layer, prefix="model.blocks")
    assert (start, end, len(layers)) == (0, 3, 3)
    assert names == ["model.blocks.0", "model.blocks.1", "model.blocks.2"]


def stage_of_a_model(partition: Any) -> Any:
    model = nn.Module()
    start, end, model.blocks = make_layers(12, lambda prefix: nn.Linear(2, 2), "blocks", partition)
    names = ["blocks.1.weight", "blocks.10.weight", "blocks.11.bias", "blocks_of_others.1.weight", "norm.weight"]
    missing = [is_pp_missing_parameter(name, model) for name in names]
    return (start, end), sorted(model.state_dict()), missing


def test_a_stage_holds_its_own_layers_and_knows_the_missing_ones(ranks: RankPool) -> None:
    first, second = ranks.run(2, on_groups, 2, 1, stage_of_a_model, Partition((11, 1)))
    assert first[0] == (0, 11)
    assert second[:2] == ((11, 12), ["blocks.11.bias", "blocks.11.weight"])
    assert first[2] == [False, False, True, False, False]
    assert second[2] == [True, True, False, False, False]


def test_a_missing_layer_gives_back_what_it_gets() -> None:
    layer, x = PPMissingLayer(1, size=2), torch.ones(2)
    assert layer(x, 3) is x
    assert layer(hidden_states=x) is x
    assert not list(layer.parameters())
    assert is_pp_missing_parameter("anything", layer)


def test_empty_intermediate_tensors() -> None:
    tensors = make_empty_intermediate_tensors_factory(["hidden_states", "residual"], 8)(
        3, torch.bfloat16, torch.device("cpu")
    )
    assert list(tensors.keys()) == ["hidden_states", "residual"]
    assert all((tensor.shape, tensor.dtype) == ((3, 8), torch.bfloat16) for _, tensor in tensors.items())
    assert not tensors["residual"].any()
