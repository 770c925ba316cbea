"""Measuring parts: the right parts, run as the model runs them, one at a time. How fast they are is no matter here."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dit_pipelining.capture.capturing import capture
from dit_pipelining.capture.signature import bind
from dit_pipelining.costs.kinds import block_kinds
from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.costs.model_costs import model_costs, node_flops
from dit_pipelining.planning import profiling
from dit_pipelining.planning.profiling import measure_parts, random_inputs
from dit_pipelining.weights.empty import empty_model
from dit_pipelining.weights.random import fill_randomly
from tests.zoo import CASES
from tests.zoo.case import build_inputs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    """Calls are made, and how long they take is made up: the number of the call."""
    calls = []

    def once(function, device):
        function()
        calls.append(function)
        return float(len(calls))

    monkeypatch.setattr(profiling, "median_seconds", once)


def weightless(name):
    case = CASES[name]
    return empty_model(case.load_class(), case.init), build_inputs(case)


@pytest.mark.parametrize(
    "name",
    ["WanTransformer3D", "FluxTransformer", "SD3Transformer", "WanVACETransformer3D", "HunyuanDiT", "DiTTransformer2D"],
)
def test_every_kind_of_block_is_measured_once(name):
    model, inputs = weightless(name)
    parts = measure_parts(model, random_inputs(inputs, CPU), CPU)
    graph = capture(model, bind(model.forward, (), inputs), count_work=True)
    kinds = block_kinds(graph, model)
    in_prologue = {node for node in graph.side_blocks if node in kinds} - set(graph.blocks)
    wanted = {kind for node, kind in kinds.items() if node not in in_prologue}
    assert wanted <= set(parts.blocks) <= set(kinds.values())
    for node in graph.blocks:
        assert parts.blocks[kinds[node]].flops == node_flops(node)
    assert all(parameter.is_meta for parameter in model.parameters())
    profile = MeasuredProfile("x", type(model).__name__, "cpu", "float32", parts.blocks, parts.prologue, parts.epilogue)
    costs = model_costs(graph, model, profile)
    assert costs.blocks[0].seconds >= parts.blocks[kinds[graph.blocks[0]]].seconds
    assert costs.prologue.seconds == parts.prologue.seconds


class UsedTensors(TorchFunctionMode):
    """Notes what functions are given."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.found |= {id(argument) for argument in args if isinstance(argument, torch.nn.Parameter)}
        return function(*args, **(kwargs or {}))


def test_what_is_kept_through_the_loop_is_not_measured(monkeypatch):
    model, inputs = weightless("WanTransformer3D")
    embedder = model.condition_embedder
    measured = []

    def once(function, device):
        with UsedTensors() as used:
            function()
        layers = {"time": embedder.time_embedder.linear_1, "text": embedder.text_embedder.linear_1}
        measured.extend(name for name, layer in layers.items() if id(layer.weight) in used.found)
        return 1.0

    monkeypatch.setattr(profiling, "median_seconds", once)
    measure_parts(model, random_inputs(inputs, CPU), CPU)
    assert measured == ["time"]


def test_only_the_weights_of_one_part_exist_at_a_time(monkeypatch):
    model, inputs = weightless("WanTransformer3D")
    largest = []

    def once(function, device):
        largest.append(sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta))
        function()
        return 1.0

    monkeypatch.setattr(profiling, "median_seconds", once)
    measure_parts(model, random_inputs(inputs, CPU), CPU)
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    prologue, measured, epilogue = largest
    assert measured == block
    every = sum(parameter.nbytes for parameter in model.parameters())
    assert prologue + epilogue <= every - len(model.blocks) * block


def test_random_inputs_keep_masks_and_numbers():
    inputs = dict(hidden=torch.zeros(2, 3), mask=torch.ones(2), ids=torch.zeros(3, dtype=torch.int64), flag=True)
    made = random_inputs({**inputs, "listed": [torch.zeros(2)]}, CPU)
    assert made["hidden"].any()
    assert made["listed"][0].any()
    assert torch.equal(made["mask"], inputs["mask"])
    assert torch.equal(made["ids"], inputs["ids"])
    assert made["flag"] is True


def test_random_weights_have_the_models_shapes_and_dtypes():
    model, _ = weightless("WanTransformer3D")
    before = {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
    fill_randomly(model, ["blocks.0", "patch_embedding"], CPU)
    filled = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert filled == {name for name in before if name.startswith(("blocks.0.", "patch_embedding."))}
    assert {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()} == before
    weight = model.patch_embedding.weight
    assert 0.01 < weight.std() < 0.03
