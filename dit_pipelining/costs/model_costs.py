"""From a captured graph to the plain numbers that partitioners work on."""

from collections.abc import Iterable, Mapping

from torch import fx, nn

from dit_pipelining.capture.graph import BlockGraph, value_bytes
from partitioners import BlockCost, ModelCosts

NOMINAL_FLOPS_PER_SECOND = 4e14
"""Turns FLOPs into seconds where nothing was measured: about what large bf16 matrix products reach on an H100-class GPU.
A partition depends on ratios only."""

NOTHING = (0, 0)
"""Size of a tensor that is a plain attribute: no weight, and on every rank."""


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


def model_costs(graph: BlockGraph, model: nn.Module) -> ModelCosts:
    """Costs of each block of the main chain and of the glue before and after.

    Glue and side blocks between two blocks of the chain count with the block before them; glue after the last block is
    the epilogue. Seconds are FLOPs at a nominal rate; where the FLOPs of a block are not known (not counted, or inside flex
    attention), parameters stand in for them (two FLOPs each for one token).
    """
    sizes = weight_sizes(model)
    chain = {node: i for i, node in enumerate(graph.blocks)}
    last = len(graph.blocks) - 1
    level = _levels(graph, chain)
    groups: dict[int, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        after_all_blocks = level[node] == last and node not in chain
        groups.setdefault(last + 1 if after_all_blocks else level[node], []).append(node)
    crossing = _crossing_bytes(graph, level, len(graph.blocks))
    counted = all(node.meta.get("flops") for node in graph.blocks)

    def cost(index: int) -> BlockCost:
        nodes = groups.get(index, [])
        elements, size = _weights(nodes, sizes, graph)
        flops = sum(node.meta.get("flops", 0) for node in nodes)
        return BlockCost(
            seconds=(flops if counted else 2 * elements) / NOMINAL_FLOPS_PER_SECOND,
            parameter_bytes=size,
            activation_bytes=max((value_bytes(node) for node in nodes), default=0),
            boundary_bytes=crossing.get(index, 0),
            flops=flops,
        )

    return ModelCosts(blocks=tuple(cost(i) for i in range(last + 1)), prologue=cost(-1), epilogue=cost(last + 1))


def _levels(graph: BlockGraph, chain: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Index of the last block of the chain behind each value; -1 for what depends on the inputs alone."""
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
    names = {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")} - {*graph.constants}
    outer = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return sum(sizes.get(name, NOTHING)[0] for name in outer), sum(sizes.get(name, NOTHING)[1] for name in outer)
