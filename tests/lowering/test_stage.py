"""Stage modules: what they hold, under which names, and what they share with the model."""

from typing import Any

import pytest
import torch
from torch import nn

from dit_pipelining.api import split_model
from dit_pipelining.errors import ConfigError, InputError
from partitioners import TooManyStagesError
from tests.capture.toy import DIM, Block, Toy, assert_splits_exactly, hidden, randn
from tests.same import assert_same
from tests.zoo import CASES, build_inputs, build_model


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", ["WanTransformer3D", "FluxTransformer", "SD3Transformer", "HunyuanDiT"])
def test_the_stages_hold_the_models_own_names_and_every_one_that_the_forward_uses(name: str) -> None:
    model = build_model(CASES[name])
    inputs = build_inputs(CASES[name])
    split = split_model(model, 3, inputs, partitioner="uniform")
    own = model.state_dict()
    held = {key for stage in split.stages for key in stage.state_dict()}
    assert held <= set(own)
    for key in own.keys() - held:  # nothing of what was left out matters
        own[key].fill_(float("nan"))
    assert_same(split(**inputs), model(**inputs))
    assert not torch.isnan(model(**inputs)[0]).any()


def test_of_wan_every_tensor_is_held() -> None:
    model = build_model(CASES["WanTransformer3D"])
    split = split_model(model, 2, build_inputs(CASES["WanTransformer3D"]), partitioner="uniform")
    assert {key for stage in split.stages for key in stage.state_dict()} == set(model.state_dict())


def test_each_block_is_held_by_one_stage() -> None:
    model = build_model(CASES["WanTransformer3D"])
    split = split_model(model, 3, build_inputs(CASES["WanTransformer3D"]), counts=(1, 2, 1))
    blocks = [{key.split(".")[1] for key in s.state_dict() if key.startswith("blocks.")} for s in split.stages]
    assert blocks == [{"0"}, {"1", "2"}, {"3"}]


def test_stages_share_their_tensors_with_the_model() -> None:
    model = build_model(CASES["FluxTransformer"])
    split = split_model(model, 2, build_inputs(CASES["FluxTransformer"]), partitioner="uniform")
    own = dict(model.named_parameters())
    for stage in split.stages:
        assert all(parameter is own[name] for name, parameter in stage.named_parameters())


class Plain(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.proj_out(self.run_blocks(self.proj_in(hidden_states)))


def test_a_stage_loads_a_state_dict_of_its_own_names() -> None:
    model, other = Plain(3), Plain(3)
    for parameter in other.parameters():
        parameter.mul_(2)
    split = split_model(model, 3, hidden(), counts=(1, 1, 1))
    for stage in split.stages:
        stage.load_state_dict({name: other.state_dict()[name] for name in stage.state_dict()})
    assert_same(split(**hidden()), other(**hidden()))


def test_hooks_and_replaced_layers_of_a_block_keep_working() -> None:
    model = Plain(2)
    split = split_model(model, 2, hidden(), partitioner="uniform")
    model.blocks[1].linear = nn.Sequential(nn.Linear(DIM, 3), nn.Linear(3, DIM))
    model.blocks[0].register_forward_hook(lambda module, args, result: result * 3)
    assert_same(split(**hidden()), model(**hidden()))


def test_a_stage_is_in_the_models_mode() -> None:
    assert not any(stage.training for stage in split_model(Plain(2).eval(), 2, hidden()).stages)
    assert all(stage.training for stage in split_model(Plain(2).train(), 2, hidden()).stages)


class WithDropout(Block):
    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def test_blocks_follow_the_models_mode_after_the_split() -> None:
    model = Plain(3, WithDropout)
    split = split_model(model, 3, hidden(), partitioner="uniform")
    torch.manual_seed(1)
    expected = model(**hidden())
    torch.manual_seed(1)
    assert_same(split(**hidden()), expected)
    model.eval()
    assert_same(split(**hidden()), model(**hidden()))
    assert not torch.equal(split(**hidden()), expected)


def test_parameter_bytes_are_those_of_the_stage() -> None:
    split = split_model(Plain(3), 2, hidden(), counts=(1, 2))
    linear = (DIM * DIM + DIM) * 4
    assert [stage.parameter_bytes for stage in split.stages] == [2 * linear, 3 * linear]


# ---- calls ------------------------------------------------------------------------------------------------------------


def test_other_shapes_and_dtypes_are_captured_when_they_come() -> None:
    model = Plain(3)
    split = split_model(model, 3, hidden(), partitioner="uniform")
    for shape in ((1, 4, DIM), (2, 7, DIM), (3, 1, DIM), (2, 4, DIM)):
        assert_same(split(randn(*shape)), model(randn(*shape)))
    model.double()
    assert_same(split(randn(2, 4, DIM, dtype=torch.float64)), model(randn(2, 4, DIM, dtype=torch.float64)))


def test_positional_and_keyword_calls_share_one_capture() -> None:
    model = Plain(2)
    split = split_model(model, 2, hidden(), partitioner="uniform")
    split(hidden()["hidden_states"])
    split(**hidden())
    assert len(split.stages[0].programs) == 1


def test_inputs_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(InputError, match=r"missing a required argument: 'hidden_states'\. It takes hidden_states"):
        split_model(Plain(2), 2, dict(latents=randn(1, 4, DIM)))


class SkipsABlock(Toy):
    """Runs fewer blocks when asked, as the guidance of SD3.5 and Wan-Animate-2 does."""

    def forward(self, hidden_states: torch.Tensor, skip: list[int] | None = None) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if i not in (skip or []):
                hidden_states = block(hidden_states)
        return hidden_states


@pytest.mark.parametrize("skip", [[0], [2], [0, 1], [3, 4], [0, 1, 3, 4], [2, 3, 4], [0, 1, 2, 3]])
def test_a_call_that_skips_blocks_runs_the_others_where_their_weights_are(skip: list[int]) -> None:
    model = SkipsABlock(5)
    split = split_model(model, 3, hidden(), counts=(2, 1, 2))
    held = [set(stage.state_dict()) for stage in split.stages]
    inputs = hidden() | dict(skip=skip)
    assert_same(split(**inputs), model(**inputs))
    assert_same(split(**hidden()), model(**hidden()))
    assert [set(stage.state_dict()) for stage in split.stages] == held


@pytest.mark.parametrize("skip", [[0], [4], [1, 2]])
def test_a_split_made_from_a_call_that_skips_blocks_has_no_place_for_them(skip: list[int]) -> None:
    model = SkipsABlock(5)
    split = split_model(model, 2, hidden() | dict(skip=skip), partitioner="uniform")
    assert split.partition.num_blocks == 5 - len(skip)
    assert_same(split(**hidden(), skip=skip), model(**hidden(), skip=skip))


def test_a_block_that_the_example_call_skipped_is_refused_by_name() -> None:
    split = split_model(SkipsABlock(5), 2, hidden() | dict(skip=[2]), partitioner="uniform")
    with pytest.raises(InputError, match=r"stage 0 needs blocks\.2, which it does not hold"):
        split(**hidden())


def test_as_many_but_other_blocks_run_where_their_weights_are() -> None:
    model = SkipsABlock(5)
    split = split_model(model, 3, hidden() | dict(skip=[]), counts=(2, 1, 2))
    for skip in ([0], [4], [1], [2]):
        assert_same(split(**hidden(), skip=skip), model(**hidden(), skip=skip))
    split = split_model(model, 2, hidden() | dict(skip=[0]), counts=(2, 2))
    with pytest.raises(InputError, match=r"blocks\.0"):
        split(**hidden(), skip=[4])


def test_more_stages_than_blocks_are_an_error() -> None:
    with pytest.raises(TooManyStagesError, match="3 stages are more than the model's 2 blocks"):
        split_model(Plain(2), 3, hidden())


@pytest.mark.parametrize("index", [-1, 2])
def test_there_is_no_pipeline_stage_beyond_the_last(index: int) -> None:
    split = split_model(Plain(2), 2, hidden(), partitioner="uniform")
    with pytest.raises(ConfigError, match=rf"no stage {index}; this split has stages 0 to 1"):
        split.pipeline_stage(index, "cpu")


def test_chosen_blocks_are_the_ones_that_are_cut() -> None:
    class TwoLists(Toy):
        def __init__(self) -> None:
            super().__init__(2)
            self.small = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            for layer in self.small:
                hidden_states = layer(hidden_states)
            return self.run_blocks(hidden_states)

    model = TwoLists()
    split = split_model(model, 3, hidden(), blocks=["small"], partitioner="uniform")
    assert split.partition.counts == (1, 1, 1)
    assert_same(split(**hidden()), model(**hidden()))


def test_the_same_split_in_bfloat16() -> None:
    assert_splits_exactly(
        Plain(3).to(torch.bfloat16), lambda: dict(hidden_states=randn(2, 4, DIM, dtype=torch.bfloat16))
    )
