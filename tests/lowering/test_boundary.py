"""What crosses a boundary, at the sizes of real models (no weights are needed for that) and on small ones."""

from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from torch import nn

from dit_pipelining.api import SplitModel, split_model
from dit_pipelining.lowering.boundary import SMALL_SHARE_OF_HIDDEN, BoundaryValue
from tests.capture.toy import DIM, Toy, assert_splits_exactly, randn, run_apart
from tests.same import assert_same
from tests.zoo import CASES, build_inputs, build_model


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def wan_14b(num_layers: int) -> Any:
    with init_empty_weights(include_buffers=False):
        return WanTransformer3DModel(num_layers=num_layers).to(torch.bfloat16)


WAN_480P = dict(
    hidden_states=empty(1, 16, 21, 60, 104),
    timestep=empty(1, dtype=torch.int64),
    encoder_hidden_states=empty(1, 512, 4096),
    return_dict=False,
)
WAN_HIDDEN = (1, 21 * 30 * 52, 5120)


def flux(num_layers: int, num_single_layers: int) -> nn.Module:
    with init_empty_weights(include_buffers=False):
        model = FluxTransformer2DModel(num_layers=num_layers, num_single_layers=num_single_layers, guidance_embeds=True)
        return model.to(torch.bfloat16)


FLUX_1024 = dict(
    hidden_states=empty(1, 4096, 64),
    encoder_hidden_states=empty(1, 512, 4096),
    pooled_projections=empty(1, 768),
    timestep=empty(1),
    guidance=empty(1, dtype=torch.float32),
    img_ids=empty(4096, 3),
    txt_ids=empty(512, 3),
    return_dict=False,
)
FLUX_HIDDEN, FLUX_TEXT = (1, 4096, 3072), (1, 512, 3072)


@pytest.fixture(scope="module")
def wan() -> SplitModel:
    return split_model(wan_14b(4), 4, WAN_480P, counts=(1, 1, 1, 1))


@pytest.fixture(scope="module")
def flux_split() -> SplitModel:
    return split_model(flux(2, 2), 4, FLUX_1024, counts=(1, 1, 1, 1))


def assert_only_these_are_large(boundary: tuple[BoundaryValue, ...], shapes: list[tuple[int, ...]]) -> None:
    limit = SMALL_SHARE_OF_HIDDEN * max(value.bytes for value in boundary)
    large = [value for value in boundary if value.bytes >= limit]
    assert [value.shape for value in large] == shapes
    assert {value.dtype for value in large} == {torch.bfloat16}
    assert sum(value.bytes for value in boundary if value not in large) < limit


def test_of_wan_only_the_hidden_states_are_large(wan: SplitModel) -> None:
    for boundary in wan.boundaries:
        assert_only_these_are_large(boundary, [WAN_HIDDEN])


def test_of_fluxs_double_stream_hidden_states_and_encoder_hidden_states_are_large(flux_split: SplitModel) -> None:
    assert_only_these_are_large(flux_split.boundaries[0], [FLUX_TEXT, FLUX_HIDDEN])


def test_of_fluxs_single_stream_no_more_is_large_than_of_the_double_stream(flux_split: SplitModel) -> None:
    double, *single = [sum(value.bytes for value in boundary) for boundary in flux_split.boundaries]
    assert all(size <= double for size in single)


def test_wans_time_projection_is_sent(wan: SplitModel) -> None:
    """It has 1.1% of the 14B model's parameters, and its result is 0.1 MB."""
    holders = [any("time_proj" in name for name in stage.state_dict()) for stage in wan.stages]
    assert holders == [True, False, False, False]
    for boundary in wan.boundaries:
        assert (1, 6, 5120) in [value.shape for value in boundary]


def test_the_result_of_parameter_free_glue_is_never_sent(wan: SplitModel, flux_split: SplitModel) -> None:
    """Rotary tables, in particular."""
    for split in (wan, flux_split):
        by_name = {node.name: node for node in split.graph.nodes}
        for boundary in split.boundaries:
            assert all(split.graph.weights_of[by_name[value.name]] for value in boundary)


def test_values_of_the_prologue_that_cross_are_relayed_under_one_name(wan: SplitModel) -> None:
    first, second, third = wan.boundaries
    assert not any(value.relayed for value in first)
    assert {value.name for value in second if value.relayed} == {value.name for value in third if value.relayed}
    assert len([value for value in second if not value.relayed]) == 1


def test_four_even_stages_of_wan_14b_are_quarters() -> None:
    """Copies of glue parameters are at most 1.5% of the model, and no stage is above 1.02 times a quarter.

    The time projection aside: it is a single linear of 4.4% of a quarter, held by the first stage alone.
    """
    model = wan_14b(40)
    split = split_model(model, 4, WAN_480P, partitioner="uniform")
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    time_projection = sum(p.numel() * p.element_size() for p in model.condition_embedder.time_proj.parameters())
    sizes = [stage.parameter_bytes for stage in split.stages]
    assert split.partition.counts == (10, 10, 10, 10)
    assert sum(sizes) <= 1.015 * total
    assert max(sizes[0] - time_projection, *sizes[1:]) <= 1.02 * total / 4


# ---- long skips -------------------------------------------------------------------------------------------------------


def test_long_skips_are_relayed_by_the_stages_in_between() -> None:
    case = CASES["HunyuanDiT"]
    model = build_model(case)
    with torch.no_grad():
        expected = model(**build_inputs(case))
        blocks = len(model.blocks)  # type: ignore[arg-type]
        split = split_model(model, blocks, build_inputs(case), counts=(1,) * blocks)
        assert_same(run_apart(split, build_inputs(case)), expected)
    hidden = max(value.bytes for boundary in split.boundaries for value in boundary)
    crossing = [sum(value.bytes == hidden for value in boundary) for boundary in split.boundaries]
    relayed = [sum(value.relayed for value in boundary if value.bytes == hidden) for boundary in split.boundaries]
    # Of 6 blocks, the last two take the results of the second and the first.
    assert blocks == 6
    assert crossing == [1, 2, 3, 3, 2]
    assert relayed == [0, 1, 2, 2, 1]


class LongSkip(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        skip = self.blocks[0](hidden_states)
        x = skip
        for block in list(self.blocks)[1:-1]:
            x = block(x)
        return self.blocks[-1](x, skip)


def test_a_skip_crosses_every_boundary_until_its_last_use() -> None:
    split = assert_splits_exactly(LongSkip(5))
    assert [len(boundary) for boundary in split.boundaries] == [1, 2, 2, 2]
    assert [[value.relayed for value in boundary] for boundary in split.boundaries[1:]] == [[True, False]] * 3


class SkipOnlyThroughTheModel(Toy):
    """The output needs the first block's result, which no other block uses."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.blocks[0](hidden_states)
        return self.run_blocks(hidden_states + first.mean()), first


def test_an_early_output_is_relayed_to_the_last_stage() -> None:
    split = assert_splits_exactly(SkipOnlyThroughTheModel(3), num_blocks=4)
    assert all((2, 4, DIM) in [value.shape for value in boundary] for boundary in split.boundaries)


# ---- send or recompute ------------------------------------------------------------------------------------------------


class WideBlock(nn.Module):
    """A block of about a thousand parameters, so that a small linear is a few percent of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x)) + context


class WithContext(Toy):
    """A context that is projected from an input and used by all blocks."""

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states, self.text(text))


class WithTime(Toy):
    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states, self.text(timestep))


class WithTable(Toy):
    """A small value that changes from step to step and needs no parameters."""

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states, torch.cos(timestep * 3))


TOKENS = 64


def inputs_with(name: str, tokens: int) -> dict[str, Any]:
    return dict(hidden_states=randn(1, TOKENS, DIM), **{name: randn(1, tokens, DIM, seed=1)})


def holders_of_text(split: SplitModel) -> list[bool]:
    return ["text.weight" in stage.state_dict() for stage in split.stages]


def few_blocks(cls: type[Toy]) -> Toy:
    """The projection has 2% of the parameters."""
    return cls(3, WideBlock)


def many_blocks(cls: type[Toy]) -> Toy:
    """The projection has 0.4% of the parameters."""
    return cls(16, WideBlock)


def tiny_blocks(cls: type[Toy]) -> Toy:
    """The projection has a quarter of the parameters."""
    return cls(3)


def test_a_value_without_parameters_is_recomputed_even_if_it_is_small_and_new_in_every_step() -> None:
    split = split_model(few_blocks(WithTable), 2, inputs_with("timestep", 1), partitioner="uniform")
    assert [len(boundary) for boundary in split.boundaries] == [1]


# One token of 64 is 1.6% of the hidden states; a value is small below 1%.
def wide_inputs(name: str, tokens: int) -> dict[str, Any]:
    return dict(hidden_states=randn(1, 4 * TOKENS, DIM), **{name: randn(1, tokens, DIM, seed=1)})


def test_a_small_value_with_two_percent_of_the_parameters_is_sent() -> None:
    split = split_model(few_blocks(WithContext), 3, wide_inputs("text", 1), counts=(1, 1, 1))
    assert holders_of_text(split) == [True, False, False]
    assert [len(boundary) for boundary in split.boundaries] == [2, 2]


def test_a_small_value_with_few_parameters_is_recomputed_if_it_is_the_same_in_every_step() -> None:
    split = split_model(many_blocks(WithContext), 2, wide_inputs("text", 1), partitioner="uniform")
    assert holders_of_text(split) == [True, True]
    assert [len(boundary) for boundary in split.boundaries] == [1]


def test_a_small_value_with_few_parameters_is_sent_if_it_changes_in_every_step() -> None:
    split = split_model(many_blocks(WithTime), 2, wide_inputs("timestep", 1), partitioner="uniform")
    assert holders_of_text(split) == [True, False]
    assert [len(boundary) for boundary in split.boundaries] == [2]


def test_a_large_value_with_two_percent_of_the_parameters_is_recomputed() -> None:
    split = split_model(few_blocks(WithContext), 2, inputs_with("text", TOKENS), partitioner="uniform")
    assert holders_of_text(split) == [True, True]
    assert [len(boundary) for boundary in split.boundaries] == [1]


def test_a_large_value_with_a_large_share_of_the_parameters_is_sent() -> None:
    split = split_model(tiny_blocks(WithContext), 2, inputs_with("text", TOKENS), partitioner="uniform")
    assert holders_of_text(split) == [True, False]
    assert [len(boundary) for boundary in split.boundaries] == [2]


@pytest.mark.parametrize("blocks", [few_blocks, many_blocks, tiny_blocks])
@pytest.mark.parametrize(("cls", "name"), [(WithContext, "text"), (WithTime, "timestep"), (WithTable, "timestep")])
@pytest.mark.parametrize("tokens", [1, 4 * TOKENS])
def test_sent_or_recomputed_the_result_is_the_same(blocks: Any, cls: type[Toy], name: str, tokens: int) -> None:
    model = blocks(cls)
    assert_splits_exactly(model, lambda: wide_inputs(name, tokens), cuts=[(1, len(model.blocks) - 1)])


class WithLateContext(Toy):
    """Only the last block uses the context."""

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        context = self.text(text)
        x = hidden_states
        for block in list(self.blocks)[:-1]:
            x = block(x, torch.zeros(()))
        return self.blocks[-1](x, context)


def test_what_only_a_late_stage_uses_is_computed_there() -> None:
    split = split_model(WithLateContext(3, WideBlock), 3, wide_inputs("text", 1), counts=(1, 1, 1))
    assert holders_of_text(split) == [False, False, True]
    assert [len(boundary) for boundary in split.boundaries] == [1, 1]


# ---- held weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(1, 4 * TOKENS), (4 * TOKENS, 1)])
def test_inputs_of_another_size_need_no_weights_that_a_stage_lacks(first: int, then: int) -> None:
    """A short text's projection is sent, and a long one's would be recomputed: not by a stage without the weights."""
    model = few_blocks(WithContext)
    with torch.no_grad():
        split = split_model(model, 3, wide_inputs("text", first), counts=(1, 1, 1))
        names = [list(stage.state_dict()) for stage in split.stages]
        for tokens in (first, then, first):
            inputs = wide_inputs("text", tokens)
            assert_same(split(**inputs), model(**inputs))
            assert_same(run_apart(split, inputs), model(**inputs))
        assert [list(stage.state_dict()) for stage in split.stages] == names


# ---- stages without blocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(0, 3), (3, 0), (1, 0, 2), (0, 3, 0), (0, 0, 3), (3, 0, 0)])
def test_a_stage_may_have_no_blocks(counts: tuple[int, ...]) -> None:
    split = assert_splits_exactly(few_blocks(WithContext), lambda: wide_inputs("text", 1), cuts=[counts])
    held = [sum(name.endswith("up.weight") for name in stage.state_dict()) for stage in split.stages]
    assert held == list(counts)


# ---- the wire ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_a_dense_tensor_crosses_without_a_copy_and_keeps_its_strides(order: tuple[int, ...]) -> None:
    inverse = sorted(range(3), key=order.__getitem__)
    tensor = randn(*(torch.Size((2, 3, 4))[dim] for dim in order)).permute(inverse)
    value = BoundaryValue("x", tuple(tensor.shape), tensor.dtype, order)
    sent = value.to_wire(tensor)
    assert sent.is_contiguous()
    assert sent.data_ptr() == tensor.data_ptr()
    assert tuple(sent.shape) == value.wire_shape
    received = value.from_wire(sent.clone())
    assert torch.equal(received, tensor)
    assert received.stride() == tensor.stride()


def test_a_tensor_with_gaps_is_packed() -> None:
    tensor = randn(2, 3, 8)[..., :4]
    value = BoundaryValue("x", (2, 3, 4), tensor.dtype, (0, 1, 2))
    assert value.to_wire(tensor).is_contiguous()
    assert torch.equal(value.from_wire(value.to_wire(tensor)), tensor)
    assert value.bytes == 2 * 3 * 4 * 4


class Transposes(Toy):
    """Blocks work on (batch, dim, tokens), transposed back between them; `is_contiguous` decides what glue does."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        for block in self.blocks:
            x = block(x).transpose(1, 2)
            x = x * 2 if x.is_contiguous() else x * 3
            x = x.transpose(1, 2)
        return x


def test_strides_of_what_crosses_are_those_of_the_model() -> None:
    split = assert_splits_exactly(Transposes(3), lambda: dict(hidden_states=randn(2, 4, DIM)))
    graph, inputs = split.resolve(dict(hidden_states=randn(2, 4, DIM)))
    tensors: tuple[torch.Tensor, ...] = ()
    by_name = {node.name: node for node in graph.nodes}
    for stage, boundary in zip(split.stages, split.boundaries, strict=False):
        tensors = stage.run(graph, tensors, inputs.leaves)
        for value, tensor in zip(boundary, tensors, strict=True):
            assert value.from_wire(tensor).stride() == by_name[value.name].meta["stride"]


def test_wire_metadata_describes_what_is_sent() -> None:
    split = split_model(Transposes(3), 3, dict(hidden_states=randn(2, 4, DIM)), partitioner="uniform")
    graph, inputs = split.resolve(dict(hidden_states=randn(2, 4, DIM)))
    tensors: tuple[torch.Tensor, ...] = ()
    for stage in split.stages:
        received, sent = stage.wire_metadata(graph)
        for given, described in zip(tensors, received, strict=True):
            assert (given.shape, given.stride(), given.dtype) == (described.shape, described.stride(), described.dtype)
        tensors = stage.run(graph, tensors, inputs.leaves)
        for made, described in zip(tensors, sent, strict=True):
            assert (made.shape, made.stride(), made.dtype) == (described.shape, described.stride(), described.dtype)


@pytest.mark.parametrize("skipped", [[0, 1], [2, 3], [0, 1, 2], [0]])
def test_a_call_that_skips_all_blocks_of_a_stage_of_sd3_begins_and_ends_as_ever(skipped: list[int]) -> None:
    """The first stage has the embeddings, and the last one what comes after the blocks; neither can be left out."""
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
    )
    inputs = dict(
        hidden_states=torch.randn(1, 4, 8, 8),
        encoder_hidden_states=torch.randn(1, 3, 8),
        pooled_projections=torch.randn(1, 8),
        timestep=torch.tensor([500.0]),
    )
    with torch.no_grad():
        split = split_model(model, 3, inputs, counts=(2, 1, 1))
        held = [stage.held_weights for stage in split.stages]
        for skip in (skipped, None, skipped):
            assert_same(split(**inputs, skip_layers=skip), model(**inputs, skip_layers=skip))
    assert [stage.held_weights for stage in split.stages] == held
