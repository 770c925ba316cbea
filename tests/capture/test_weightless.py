"""A capture needs no weights: parameters on the meta device give the graph that real ones give."""

from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dit_pipelining.api import split_model
from dit_pipelining.capture.capturing import capture
from dit_pipelining.capture.graph import BlockGraph
from tests.capture.toy import DIM, Toy, hidden, randn
from tests.zoo import CASES, build_inputs, build_model


def described(graph: BlockGraph) -> list[tuple[Any, ...]]:
    """Every node with all that lowering looks at; memory addresses left out."""
    return [
        (
            node.name,
            node.op,
            node.target if node.op != "call_function" else getattr(node.target, "__name__", ""),
            str(node.args),
            str(node.kwargs),
            *(node.meta.get(key) for key in ("shape", "dtype", "stride", "block", "input", "overwritten", "flops")),
        )
        for node in graph.nodes
    ]


def to_meta(model: nn.Module) -> nn.Module:
    """Parameters move to the meta device, tied ones together; buffers keep their values."""
    moved = {id(parameter): nn.Parameter(parameter.to("meta")) for parameter in model.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = moved[id(parameter)]
    return model


class Plain(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.proj_out(self.run_blocks(self.proj_in(hidden_states)))


class Autocasts(Toy):
    """What breaks when inputs are on the meta device: autocast, plain tensors, a table with values."""

    length: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3)
        self.plain = randn(4, DIM, seed=5)
        self.register_buffer("length", torch.tensor(3), persistent=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            context = self.proj_in(self.plain)[: int(self.length)].sum(0)
        return self.run_blocks(hidden_states, context.to(self.proj_out.weight.dtype))


def test_a_model_without_weights_gives_the_same_graph() -> None:
    assert described(capture(to_meta(Autocasts()), hidden())) == described(capture(Autocasts(), hidden()))


@pytest.mark.parametrize(
    "name",
    ["WanTransformer3D", "FluxTransformer", "SD3Transformer", "CogVideoXTransformer", "Lumina2Transformer@mask"],
)
def test_transformers_without_weights_give_the_same_graph(name: str) -> None:
    case = CASES[name]
    expected = capture(build_model(case), build_inputs(case), count_work=True)
    weightless = capture(to_meta(build_model(case)), build_inputs(case), count_work=True)
    assert described(weightless) == described(expected)


def test_a_transformer_built_without_weights_is_split_with_real_tables() -> None:
    case = CASES["WanTransformer3D"]
    with init_empty_weights(include_buffers=False):
        model = case.load_class()(**case.init)
    split = split_model(model, 2, build_inputs(case), partitioner="uniform")
    tensors = [tensor for stage in split.stages for tensor in stage.parameters()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert described(split.graph) == described(capture(build_model(case), build_inputs(case), count_work=True))


def test_a_capture_leaves_weightless_parameters_on_the_meta_device() -> None:
    model = to_meta(Autocasts())
    capture(model, hidden())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.plain.device.type == "cpu"


def test_tied_weights_stay_one_tensor() -> None:
    class Tied(Toy):
        def __init__(self) -> None:
            super().__init__(2)
            self.proj_out.weight = self.proj_in.weight

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            assert self.proj_out.weight is self.proj_in.weight
            return self.proj_out(self.run_blocks(self.proj_in(hidden_states)))

    capture(Tied(), hidden())
    capture(to_meta(Tied()), hidden())


def test_weights_that_are_still_on_the_cpu_are_captured_where_the_inputs_are() -> None:
    """A pipeline that was loaded on the CPU is split first, and each rank then moves its own stage to its GPU."""
    with FakeTensorMode():  # an accelerator that this machine need not have
        inputs = {name: torch.empty(tensor.shape, device="maia") for name, tensor in hidden().items()}
    graph = capture(Plain(), inputs)
    assert {node.meta["device"].type for node in graph.blocks} == {"maia"}
