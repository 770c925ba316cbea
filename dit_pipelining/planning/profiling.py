"""Measure a transformer's parts on the machine at hand: one block of each kind, the prologue, the epilogue.

The captured forward runs once from its beginning to its end, on random inputs, so that every part gets arguments of the
right structure. Weights are random too, and only those of the part that is measured exist; of blocks that are alike only
the first one runs, and its outputs stand for those of the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn

from dit_pipelining.capture.capturing import capture
from dit_pipelining.capture.code import compile_nodes
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.signature import CallInputs, bind, flatten_inputs
from dit_pipelining.costs.measured import Measured
from dit_pipelining.costs.model_costs import Section, node_flops, sections
from dit_pipelining.lowering.invariant import split_invariant
from dit_pipelining.planning.stopwatch import median_seconds
from dit_pipelining.torch_internals import tree_map
from dit_pipelining.weights.load import release_weights
from dit_pipelining.weights.random import fill_randomly


@dataclass(frozen=True)
class MeasuredParts:
    """What a transformer's parts take.

    Attributes:
        blocks: by kind, see `block_kinds`.
        prologue, epilogue: the glue before and after; what stays the same through a denoising loop is left out.
    """

    blocks: Mapping[str, Measured]
    prologue: Measured
    epilogue: Measured


def measure_parts(model: nn.Module, inputs: Mapping[str, Any], device: torch.device) -> MeasuredParts:
    """Measure one call of a transformer, part by part.

    Args:
        model: without weights (parameters on the meta device); it has none afterwards either.
        inputs: keyword arguments of one call, on `device`.
        device: that is measured.

    Raises:
        CaptureError, InputError: the forward cannot be recorded with these inputs.
    """
    kwargs = bind(model.forward, (), inputs)
    graph = capture(model, kwargs, count_work=True)
    bench = _Bench(model, graph, flatten_inputs(kwargs), device)
    prologue, *blocks, epilogue = sections(graph, model)
    with torch.no_grad():
        before = bench.measure_glue(prologue)
        for section in blocks:
            bench.run_blocks(section)
        after = bench.measure_glue(epilogue)
    return MeasuredParts(bench.blocks, before, after)


def random_inputs(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Inputs on a device, with random numbers in the place of zeros; masks of ones stay what they are."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point() and not value.any():
            return torch.randn(value.shape, device=device).to(value.dtype)
        return value.to(device)

    return {name: tree_map(moved, value) for name, value in inputs.items()}


class _Bench:
    """The values of a forward that is under way, and what has been measured of it."""

    def __init__(self, model: nn.Module, graph: BlockGraph, inputs: CallInputs, device: torch.device) -> None:
        self.model = model
        self.graph = graph
        self.device = device
        self.blocks: dict[str, Measured] = {}
        self._leaves = inputs.leaves
        self._values: dict[fx.Node, Any] = {
            node: self._leaves[node.meta["input"]] for node in graph.graph.nodes if node.op == "placeholder"
        }
        self._ran: set[fx.Node] = set(self._values)
        self._block_outputs: dict[str, Any] = {}

    def measure_glue(self, section: Section) -> Measured:
        """Run glue, and measure that part of it that runs at every step."""
        nodes = self._without_inputs(section.nodes)
        fill_randomly(self.model, self._weights(nodes), self.device)
        outputs = self._used_outside(nodes)
        groups, rest = split_invariant(self.graph, section.nodes, outputs)
        for group in groups:
            self._values.update(zip(group.values, group.kept.get(self.model, self._leaves), strict=True))
        rest, outputs = self._without_inputs(rest), [node for node in outputs if node not in self._values]
        run = self._compiled(rest, outputs)
        measured = Measured(median_seconds(run, self.device), sum(map(node_flops, section.nodes)))
        self._finish(nodes, outputs, run())
        return measured

    def run_blocks(self, section: Section) -> None:
        """Run a block of the chain with what counts with it, and measure blocks of a kind that is new."""
        for is_block, run in groupby(section.nodes, key=lambda node: "block" in node.meta):
            nodes = list(run)
            if is_block:
                for node in nodes:
                    self._run_block(node, section.kinds[node])
            else:
                fill_randomly(self.model, self._weights(nodes), self.device)
                outputs = self._used_outside(nodes)
                self._finish(nodes, outputs, self._compiled(nodes, outputs)())

    def _run_block(self, node: fx.Node, kind: str) -> None:
        if kind not in self.blocks:
            fill_randomly(self.model, self._weights([node]), self.device)
            run = self._compiled([node], [node])
            self.blocks[kind] = Measured(median_seconds(run, self.device), node_flops(node))
            (self._block_outputs[kind],) = run()
        self._finish([node], [node], [self._block_outputs[kind]])

    def _without_inputs(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if node.op != "placeholder"]

    def _compiled(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Callable[[], tuple[Any, ...]]:
        own = set(nodes)
        arguments = [
            source
            for source in dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
            if source not in own
        ]
        function = compile_nodes(nodes, outputs, arguments, self.graph.constants)
        values = [self._values[node] for node in arguments]
        return lambda: function(self.model, *values)

    def _finish(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], values: Sequence[Any]) -> None:
        """Note values, drop those that nothing needs any more, and the weights."""
        self._ran.update(nodes)
        self._values.update(zip(outputs, values, strict=True))
        self._values = {
            node: value for node, value in self._values.items() if any(user not in self._ran for user in node.users)
        }
        release_weights(self.model, ())

    def _used_outside(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        own = set(nodes)
        results = {*self.graph.output_nodes, *self.graph.output_objects}
        return [node for node in nodes if node in results or any(user not in own for user in node.users)]

    def _weights(self, nodes: Sequence[fx.Node]) -> list[str]:
        names = {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}
        return sorted(names - set(self.graph.constants))
