"""Compiled blocks and stages replayed as CUDA graphs."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from dit_pipelining import split_model
from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import ConfigError
from dit_pipelining.lowering.cuda_graph import WARM_UPS
from dit_pipelining.lowering.split import SplitModel
from tests.zoo import CASES, build_inputs, build_model

WAN = CASES["WanTransformer3D"]
FLUX = CASES["FluxTransformer"]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts what is compiled; blocks run as they are, so that no C++ compiler is needed."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=counter))
    return counter


@torch.no_grad()
def test_a_kind_of_block_is_compiled_once_however_many_there_are(counter: Any) -> None:
    model, inputs = build_model(WAN), build_inputs(WAN)
    expected = model(**inputs)
    split = split_model(model, 2, inputs)
    split.compile("blocks")
    assert torch.equal(split(**inputs)[0], expected[0])
    kinds = len({type(model.get_submodule(str(node.target))) for node in split.graph.blocks})
    assert len(split.graph.blocks) > kinds
    assert counter.frame_count == kinds


@torch.no_grad()
def test_cuts_among_joint_and_single_blocks_compile_nothing_that_the_whole_model_does_not(counter: Any) -> None:
    model, inputs = build_model(FLUX), build_inputs(FLUX)
    model.compile_repeated_blocks()  # type: ignore[operator]
    expected = model(**inputs)[0]
    whole = counter.frame_count
    assert whole
    for stages in (2, 4):
        assert torch.equal(split_model(model, stages, inputs)(**inputs)[0], expected)
        assert counter.frame_count == whole


@torch.no_grad()
def test_another_signature_is_captured_although_blocks_are_compiled(counter: Any) -> None:
    model, inputs = build_model(WAN), build_inputs(WAN)
    split = split_model(model, 2, inputs)
    split.compile("blocks")
    wide = {**inputs, "hidden_states": torch.cat([inputs["hidden_states"]] * 2, dim=-1)}
    assert torch.equal(split(**wide)[0], model(**wide)[0])


def test_an_unknown_way_of_compiling_is_refused() -> None:
    with pytest.raises(ConfigError, match="blocks-cudagraphs"):
        ParallelConfig(compile="everything")


def on_gpu() -> tuple[nn.Module, dict[str, Any], SplitModel]:
    model, inputs = build_model(WAN), build_inputs(WAN)
    model = model.to("cuda", torch.bfloat16)
    inputs = {
        name: value.to("cuda", torch.bfloat16 if value.is_floating_point() else None)
        if torch.is_tensor(value)
        else value
        for name, value in inputs.items()
    }
    split = split_model(model, 2, inputs)
    for stage in split.stages:  # graphs alone: the bits stay
        stage.cuda_graphs = True
        for program in list(stage.programs.values()):
            stage.add_program(program)
    return model, inputs, split


@needs_cuda
@torch.no_grad()
def test_a_replayed_stage_gives_the_bits_of_the_model_with_new_inputs_and_new_weights() -> None:
    model, inputs, split = on_gpu()
    for _ in range(WARM_UPS + 3):
        inputs = {**inputs, "hidden_states": torch.randn_like(inputs["hidden_states"])}
        assert torch.equal(split(**inputs)[0], model(**inputs)[0])
    weight = model.get_parameter("blocks.0.attn1.to_q.weight")
    weight.data = torch.randn_like(weight)  # lies elsewhere now
    assert torch.equal(split(**inputs)[0], model(**inputs)[0])
    weight.mul_(0.5)
    assert torch.equal(split(**inputs)[0], model(**inputs)[0])
    model.blocks[0].attn1.to_q = nn.Linear(*weight.shape[::-1], device="cuda", dtype=torch.bfloat16)  # type: ignore
    assert torch.equal(split(**inputs)[0], model(**inputs)[0])
