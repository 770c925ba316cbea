"""Values that stay the same through a denoising loop: which they are, and the functions that compute them once."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from dit_pipelining.capture.code import compile_nodes
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.kept import KeptFunction
from dit_pipelining.capture.nodes import ancestors


@dataclass(frozen=True, eq=False)
class InvariantGroup:
    """Values that depend on one set of inputs, none of which changes from step to step.

    Attributes:
        values: the nodes.
        kept: computes them all at once.
    """

    values: tuple[fx.Node, ...]
    kept: KeptFunction


def split_invariant(
    graph: BlockGraph, computed: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[list[InvariantGroup], list[fx.Node]]:
    """Separate what a stage can compute once from what it computes at every step.

    Args:
        graph: the captured forward.
        computed: nodes the stage runs, in execution order.
        outputs: nodes the stage returns.

    Returns:
        the groups of invariant values that the rest uses, and the rest, in execution order.
    """
    # A value that something, or the caller, writes into later cannot be kept, and then neither can what follows from it.
    unkept: set[fx.Node] = set()
    while True:
        stable = _stable_nodes(graph, computed, unkept)
        used_by_rest = {source for node in computed if node not in stable for source in node.all_input_nodes}
        frontier = [node for node in computed if node in stable and (node in used_by_rest or node in set(outputs))]
        overwritten = {node for node in frontier if _is_written_into(node)}
        if not overwritten:
            break
        unkept |= overwritten
    given = {node for node in stable if node.op in ("placeholder", "get_attr")}
    groups: dict[tuple[str, ...], list[fx.Node]] = {}
    for node in frontier:
        if node not in given:
            groups.setdefault(tuple(sorted(graph.inputs_of[node])), []).append(node)
    made = [_group(graph, inputs, values) for inputs, values in groups.items()]
    rest = [node for node in computed if node not in stable or (node in given and node in frontier)]
    return made, rest


def _is_written_into(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return bool(node.meta.get("overwritten"))
    return bool(node.meta.get("overwritten") or node.meta.get("returned"))


def _stable_nodes(graph: BlockGraph, computed: Sequence[fx.Node], unkept: set[fx.Node]) -> set[fx.Node]:
    """Nodes whose values are the same at every step, `unkept` ones and what follows from them left out."""
    stable: set[fx.Node] = set()
    for node in computed:
        is_object = node.op == "placeholder" and "shape" not in node.meta  # may change inside
        if node in unkept or is_object or graph.changes_each_step(node):
            continue
        if all(source in stable for source in node.all_input_nodes):
            stable.add(node)
    return stable


def _group(graph: BlockGraph, inputs: tuple[str, ...], values: list[fx.Node]) -> InvariantGroup:
    needed = ancestors(values)
    nodes = [node for node in graph.graph.nodes if node in needed]
    arguments = {node.meta["input"]: node for node in nodes if node.op == "placeholder"}
    weights = sorted(frozenset().union(*(graph.weights_of[value] for value in values)))
    function = compile_nodes(nodes, values, [arguments[path] for path in inputs], graph.constants)
    return InvariantGroup(tuple(values), KeptFunction(inputs, tuple(weights), function))
