"""Transformers that share the ranks: each is cut with the weights of the others in mind."""

import math

import pytest
from diffusers import WanTransformer3DModel
from torch import nn

from dit_pipelining.cli.capturing import once_each
from dit_pipelining.cli.study import Question, study
from dit_pipelining.comm.layout import Layout
from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.together import Others, others_of, with_others
from dit_pipelining.weights.empty import empty_model
from partitioners import BlockCost, DoesNotFitError, ModelCosts
from tests.zoo import CASES

WAN = CASES["WanTransformer3D"].init


def wan(**changed: int) -> nn.Module:
    return empty_model(WanTransformer3DModel, {**WAN, **changed})


def size_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_those_that_are_alike_are_counted_block_by_block_and_the_rest_as_an_even_share() -> None:
    longer = wan(num_layers=WAN["num_layers"] + 1)
    found = others_of(wan(), [wan(), longer], 3, Layout(pipeline=3))
    assert found == Others(1, math.ceil(size_of(longer) / 3))
    costs = ModelCosts((BlockCost(1.0, 10), BlockCost(1.0, 20)), BlockCost(0.0, 3), BlockCost(0.0, 4), 5)
    both = with_others(costs, Others(1, 7))
    assert [block.parameter_bytes for block in both.blocks] == [20, 40]
    assert (both.prologue.parameter_bytes, both.epilogue.parameter_bytes, both.replicated_bytes) == (6, 8, 17)


def test_the_rest_is_shared_inside_stages_too() -> None:
    model, other = wan(), wan(num_layers=WAN["num_layers"] + 1)
    blocks = sum(own.nbytes for name, own in other.named_parameters() if name.startswith("blocks."))
    shared = others_of(model, [other], 2, Layout(pipeline=2, ulysses=2), shards=2)
    assert shared.rank_bytes == math.ceil((size_of(other) - blocks / 2) / 2)


def test_two_experts_are_shown_where_both_fit() -> None:
    capture = once_each()
    question = Question(
        model="wan2.2-t2v-a14b", config=ParallelConfig(pipeline_parallel_size=2, ranks="80GB,32GB"), steps=1
    )
    picture = study(question, capture)
    first, second = picture.reports[0].partition
    assert first > second
    assert not any(picture.shortfalls)
    with pytest.raises(DoesNotFitError):
        study(
            Question(model="wan2.2-t2v-a14b", config=ParallelConfig(pipeline_parallel_size=2, ranks="40GB"), steps=1),
            capture,
        )
