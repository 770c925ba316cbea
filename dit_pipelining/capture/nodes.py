"""What the nodes of a captured graph are, and what they are computed from."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from dit_pipelining.capture import replay


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything they are computed from."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is known to be a tensor (and not a tuple, an object or a number)."""
    return "shape" in node.meta


def value_bytes(node: fx.Node) -> int:
    """Bytes of a tensor value; 0 for values that are no tensors."""
    if not is_tensor(node):
        return 0
    dtype: torch.dtype = node.meta["dtype"]
    return math.prod(node.meta["shape"]) * dtype.itemsize


def is_object(node: fx.Node) -> bool:
    """Whether the node's value is a Python object of the caller's or one that glue made."""
    return "object" in node.meta or "template" in node.meta


def nodes_in(item: Any) -> Iterator[fx.Node]:
    """Every node in a nested value, such as a forward's output."""
    if isinstance(item, fx.Node):
        yield item
    elif isinstance(item, replay.Rebuilt):
        yield from nodes_in(item.fields)
    elif isinstance(item, replay.Typed):
        yield from nodes_in(item.items)
    elif isinstance(item, list | tuple):
        for part in item:
            yield from nodes_in(part)
    elif isinstance(item, dict):
        for part in item.values():
            yield from nodes_in(part)
