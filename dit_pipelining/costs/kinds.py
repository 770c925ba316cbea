"""Kinds of blocks: blocks of one class, size and input shapes take the same time, so one of each kind is measured."""

from collections.abc import Hashable

from torch import fx, nn

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.nodes import is_tensor


def block_kinds(graph: BlockGraph, model: nn.Module) -> dict[fx.Node, str]:
    """The kind of every block call: its class, with a number where blocks of one class differ in size or inputs.

    The names depend on the model and the inputs' shapes alone, so that a profile that was measured elsewhere can be read.
    """
    names: dict[Hashable, str] = {}
    found: dict[fx.Node, str] = {}
    for node in graph.graph.nodes:
        if "block" not in node.meta:
            continue
        block = model.get_submodule(node.meta["block"])
        name = type(block).__name__
        elements = sum(parameter.numel() for parameter in block.parameters())
        shapes = tuple(
            (source.meta["shape"], source.meta["dtype"]) for source in node.all_input_nodes if is_tensor(source)
        )
        key = (name, elements, shapes)
        if key not in names:
            alike = sum(other[0] == name for other in names)  # type: ignore[index]
            names[key] = name if not alike else f"{name} {alike + 1}"
        found[node] = names[key]
    return found
