"""Costs of captured graphs against formulas written by hand, at the sizes of real models."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from torch import nn

from dit_pipelining.capture.capturing import capture
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.costs.model_costs import NOMINAL_FLOPS_PER_SECOND, model_costs, weight_sizes
from partitioners import ModelCosts
from tests.capture.toy import DIM, Toy, randn
from tests.costs import models
from tests.costs.models import empty

BFLOAT16_BYTES = 2


@dataclass
class Captured:
    model: Any
    graph: BlockGraph
    costs: ModelCosts


def captured(model: nn.Module, inputs: dict[str, Any]) -> Captured:
    graph = capture(model, inputs, count_work=True)
    return Captured(model, graph, model_costs(graph, model))


@pytest.fixture(scope="module")
def wan() -> Captured:
    """Wan 14B's blocks at 480p x 81 frames."""
    with init_empty_weights(include_buffers=False):
        model = WanTransformer3DModel(num_layers=3).to(torch.bfloat16)
    inputs = dict(
        hidden_states=empty(1, 16, 21, 60, 104),
        timestep=empty(1, dtype=torch.int64),
        encoder_hidden_states=empty(1, 512, 4096),
    )
    return captured(model, inputs)


@pytest.fixture(scope="module")
def flux() -> Captured:
    return captured(*models.flux())


WAN_TOKENS, WAN_TEXT, WAN_DIM, WAN_FFN = 21 * 30 * 52, 512, 5120, 13824
FLUX_TOKENS, FLUX_TEXT, FLUX_DIM = 4096, 512, 3072


def linear(tokens: int, inputs: int, outputs: int) -> int:
    return 2 * tokens * inputs * outputs


def attention(queries: int, keys: int, dim: int) -> int:
    """Scores and weighted values, all heads together."""
    return 2 * 2 * queries * keys * dim


def test_flops_of_a_wan_block(wan: Captured) -> None:
    own = 4 * linear(WAN_TOKENS, WAN_DIM, WAN_DIM) + attention(WAN_TOKENS, WAN_TOKENS, WAN_DIM)
    cross = 2 * linear(WAN_TOKENS, WAN_DIM, WAN_DIM) + 2 * linear(WAN_TEXT, WAN_DIM, WAN_DIM)
    cross += attention(WAN_TOKENS, WAN_TEXT, WAN_DIM)
    feed_forward = 2 * linear(WAN_TOKENS, WAN_DIM, WAN_FFN)
    for block in wan.costs.blocks:
        assert block.flops == pytest.approx(own + cross + feed_forward, rel=0.01)


def test_flops_of_flux_blocks(flux: Captured) -> None:
    tokens, dim = FLUX_TOKENS + FLUX_TEXT, FLUX_DIM
    double = 4 * linear(tokens, dim, dim) + attention(tokens, tokens, dim) + 2 * linear(tokens, dim, 4 * dim)
    single = 3 * linear(tokens, dim, dim) + attention(tokens, tokens, dim)
    single += linear(tokens, dim, 4 * dim) + linear(tokens, 5 * dim, dim)
    assert [block.flops for block in flux.costs.blocks] == pytest.approx([double] * 2 + [single] * 2, rel=0.01)


def test_flops_of_the_glue_are_not_among_the_blocks(wan: Captured) -> None:
    patches = linear(WAN_TOKENS, 16 * 4, WAN_DIM)
    text = linear(WAN_TEXT, 4096, WAN_DIM) + linear(WAN_TEXT, WAN_DIM, WAN_DIM)
    time = linear(1, 256, WAN_DIM) + linear(1, WAN_DIM, WAN_DIM) + linear(1, WAN_DIM, 6 * WAN_DIM)
    assert wan.costs.prologue.flops == pytest.approx(patches + text + time, rel=0.01)
    assert wan.costs.epilogue.flops == pytest.approx(linear(WAN_TOKENS, WAN_DIM, 16 * 4), rel=0.01)


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_seconds_are_flops_at_the_nominal_rate(name: str, request: pytest.FixtureRequest) -> None:
    costs: ModelCosts = request.getfixturevalue(name).costs
    for cost in (*costs.blocks, costs.prologue, costs.epilogue):
        assert cost.seconds == pytest.approx(cost.flops / NOMINAL_FLOPS_PER_SECOND)


def test_parameter_bytes_of_wans_blocks_are_their_weights(wan: Captured) -> None:
    attention_weights = 8 * (WAN_DIM**2 + WAN_DIM) + 4 * WAN_DIM  # two attentions; norms of queries and keys
    feed_forward = 2 * WAN_DIM * WAN_FFN + WAN_FFN + WAN_DIM
    modulation = 6 * WAN_DIM + 2 * WAN_DIM  # the table; the norm before the cross attention
    expected = BFLOAT16_BYTES * (attention_weights + feed_forward + modulation)
    assert [block.parameter_bytes for block in wan.costs.blocks] == [expected] * 3


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_blocks_and_glue_add_up_to_the_model(name: str, request: pytest.FixtureRequest) -> None:
    case: Captured = request.getfixturevalue(name)
    total = sum(parameter.numel() * parameter.element_size() for parameter in case.model.parameters())
    parts = (*case.costs.blocks, case.costs.prologue, case.costs.epilogue)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in case.model.buffers())
    assert total <= sum(cost.parameter_bytes for cost in parts) <= total + buffers


def test_boundary_bytes_of_wan_are_its_hidden_states(wan: Captured) -> None:
    hidden = WAN_TOKENS * WAN_DIM * BFLOAT16_BYTES
    assert [block.boundary_bytes for block in wan.costs.blocks[:-1]] == [hidden] * 2


def test_boundary_bytes_of_flux_are_image_and_text(flux: Captured) -> None:
    both = (FLUX_TOKENS + FLUX_TEXT) * FLUX_DIM * BFLOAT16_BYTES
    assert [block.boundary_bytes for block in flux.costs.blocks[:-1]] == [both] * 3


class LongSkip(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        skip = self.blocks[0](hidden_states)
        x = self.blocks[2](self.blocks[1](skip))
        return self.blocks[3](x, skip)


def test_a_long_skip_counts_at_every_boundary_that_it_crosses() -> None:
    model = LongSkip(4)
    costs = model_costs(capture(model, dict(hidden_states=randn(2, 4, DIM))), model)
    hidden = 2 * 4 * DIM * 4
    assert [block.boundary_bytes for block in costs.blocks[:-1]] == [hidden, 2 * hidden, 2 * hidden]


def test_without_counted_flops_parameters_stand_in_for_them() -> None:
    model = LongSkip(4)
    costs = model_costs(capture(model, dict(hidden_states=randn(2, 4, DIM))), model)
    assert [block.flops for block in costs.blocks] == [0] * 4
    elements = DIM * DIM + DIM
    assert costs.blocks[0].seconds == pytest.approx(2 * elements / NOMINAL_FLOPS_PER_SECOND)


def test_a_modules_size_is_that_of_its_parameters_and_a_buffers_its_bytes() -> None:
    model = LongSkip(2)
    model.register_buffer("table", torch.zeros(3, dtype=torch.float64))
    sizes = weight_sizes(model)
    linear_elements = DIM * DIM + DIM
    assert sizes["blocks.0"] == (linear_elements, 4 * linear_elements)
    assert sizes["blocks.0.linear.weight"] == (DIM * DIM, 4 * DIM * DIM)
    assert sizes["table"] == (0, 24)
