"""From a captured graph to the plain numbers that partitioners work on."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import fx, nn

from dit_pipelining.capture.counting import Operation, Work
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.nodes import value_bytes
from dit_pipelining.costs.kinds import block_kinds
from partitioners import BlockCost, ModelCosts

NOMINAL_FLOPS_PER_SECOND = 4e14
"""Turns FLOPs into seconds where no device is named: about what large bf16 matrix products reach on an H100-class GPU.
A partition depends on ratios only."""

NOTHING = (0, 0)
"""Size of a tensor that is a plain attribute: no weight, and on every rank."""


@dataclass(frozen=True, eq=False)
class Section:
    """What a partitioner cannot cut: a block of the main chain with what counts with it, or the glue before or after.

    Attributes:
        place: `prologue`, `block` or `epilogue`.
        nodes: of the captured graph, in execution order.
        kinds: the kind of every block among them, see `block_kinds`.
        counted: whether the work of the blocks is known.
        elements: of the parameters that it uses.
    """

    place: str
    nodes: Sequence[fx.Node]
    kinds: Mapping[fx.Node, str]
    counted: bool
    elements: int

    @property
    def flops(self) -> int:
        """Floating-point operations; where they are not known, two for each parameter, as for one token."""
        return sum(map(node_flops, self.nodes)) if self.counted else 2 * self.elements

    @cached_property
    def operations(self) -> Counter[Operation]:
        """How often each operation occurs."""
        total: Counter[Operation] = Counter()
        for node in self.nodes:
            total.update(node.meta.get("work", Work()).operations)
        return total

    @property
    def activation_bytes(self) -> int:
        """Memory of what its fullest node is given and makes."""
        return max(map(_activation_bytes, self.nodes), default=0)


class Timing(Protocol):
    """How long a section takes: from a device's data sheet (`Roofline`) or measured (`MeasuredProfile`)."""

    def seconds(self, section: Section) -> float: ...


class NominalRate:
    """FLOPs at one rate: enough to cut a model for equal devices."""

    def seconds(self, section: Section) -> float:
        return section.flops / NOMINAL_FLOPS_PER_SECOND


def weight_sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Number of elements and of bytes of every module (all its parameters), parameter and buffer, by name.

    Buffers count zero elements: they are no parameters, but a stage that uses one holds its bytes.
    """
    sizes: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        sizes[name] = (sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sizes[name] = (parameter.numel(), parameter.numel() * parameter.element_size())
    for name, buffer in model.named_buffers(remove_duplicate=False):
        sizes[name] = (0, buffer.numel() * buffer.element_size())
    return sizes


def model_costs(graph: BlockGraph, model: nn.Module, timing: Timing | None = None) -> ModelCosts:
    """Costs of each block of the main chain and of the glue before and after.

    Glue and side blocks between two blocks of the chain count with the block before them; glue after the last block is
    the epilogue.

    Args:
        graph: of the model's forward, captured with `count_work`.
        model: with weights or without.
        timing: how long each part takes. Default: FLOPs at a nominal rate.

    Raises:
        ConfigError: the timing does not know these blocks.
    """
    timing = timing or NominalRate()
    sizes = weight_sizes(model)
    crossing = _crossing_bytes(graph, _levels(graph), len(graph.blocks))

    def cost(section: Section, boundary_bytes: int) -> BlockCost:
        return BlockCost(
            seconds=timing.seconds(section),
            parameter_bytes=_weights(section.nodes, sizes, graph)[1],
            activation_bytes=section.activation_bytes,
            boundary_bytes=boundary_bytes,
            flops=sum(map(node_flops, section.nodes)),
        )

    prologue, *blocks, epilogue = sections(graph, model)
    return ModelCosts(
        blocks=tuple(cost(section, crossing.get(i, 0)) for i, section in enumerate(blocks)),
        prologue=cost(prologue, crossing.get(-1, 0)),
        epilogue=cost(epilogue, 0),
    )


def sections(graph: BlockGraph, model: nn.Module) -> list[Section]:
    """What lies between the cuts that a partitioner may make: the prologue, each block of the chain, the epilogue."""
    sizes = weight_sizes(model)
    level = _levels(graph)
    chain = set(graph.blocks)
    last = len(graph.blocks) - 1
    groups: list[list[fx.Node]] = [[] for _ in range(last + 3)]
    for node in graph.graph.nodes:
        after_all_blocks = level[node] == last and node not in chain
        groups[last + 2 if after_all_blocks else level[node] + 1].append(node)
    counted = all(map(node_flops, graph.blocks))
    kinds = block_kinds(graph, model)
    places = ["prologue", *["block"] * (last + 1), "epilogue"]
    return [
        Section(place, nodes, kinds, counted, _weights(nodes, sizes, graph)[0])
        for place, nodes in zip(places, groups, strict=True)
    ]


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of one node; 0 where they were not counted."""
    flops: int = node.meta.get("flops", 0)
    return flops


def _activation_bytes(node: fx.Node) -> int:
    """Memory while a node runs: what it is given, and what it makes, at its fullest."""
    given = sum(value_bytes(source) for source in node.all_input_nodes if source.op != "get_attr")
    return given + max(node.meta.get("work", Work()).peak_bytes, value_bytes(node))


def _levels(graph: BlockGraph) -> dict[fx.Node, int]:
    """Index of the last block of the chain behind each value; -1 for what depends on the inputs alone."""
    chain = {node: i for i, node in enumerate(graph.blocks)}
    level: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        level[node] = max([chain.get(node, -1), *(level[source] for source in node.all_input_nodes)])
    return level


def _crossing_bytes(graph: BlockGraph, level: Mapping[fx.Node, int], blocks: int) -> dict[int, int]:
    """Bytes of block-made values that live across the cut after each block."""
    last_use = {node: max([level[user] for user in node.users], default=level[node]) for node in graph.graph.nodes}
    for node in graph.output_nodes:
        last_use[node] = blocks
    alive = [node for node in graph.graph.nodes if level[node] >= 0]
    return {
        cut: sum(value_bytes(node) for node in alive if level[node] <= cut < last_use[node])
        for cut in range(blocks - 1)
    }


def _weights(nodes: Iterable[fx.Node], sizes: Mapping[str, tuple[int, int]], graph: BlockGraph) -> tuple[int, int]:
    names = frozenset().union(*map(graph.own_weights, nodes))
    outer = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return sum(sizes.get(name, NOTHING)[0] for name in outer), sum(sizes.get(name, NOTHING)[1] for name in outer)
