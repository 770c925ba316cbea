"""Values that stay the same through a denoising loop: which they are, and the functions that compute them once."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from dit_pipelining.capture.code import compile_nodes
from dit_pipelining.capture.graph import BlockGraph, ancestors
from dit_pipelining.capture.kept import KeptFunction
from dit_pipelining.lowering.boundary import changes_each_step


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
    stable = _stable_nodes(graph, computed)
    used_by_rest = {source for node in computed if node not in stable for source in node.all_input_nodes} | set(outputs)
    given = {node for node in stable if node.op in ("placeholder", "get_attr")}
    groups: dict[tuple[str, ...], list[fx.Node]] = {}
    for node in computed:
        if node in stable and node in used_by_rest and node not in given:
            groups.setdefault(tuple(sorted(graph.inputs_of[node])), []).append(node)
    made = [_group(graph, inputs, values) for inputs, values in groups.items()]
    rest = [node for node in computed if node not in stable or (node in given and node in used_by_rest)]
    return made, rest


def _stable_nodes(graph: BlockGraph, computed: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes whose values stay the same and whose memory nothing writes into."""
    stable: set[fx.Node] = set()
    for node in computed:
        if node.meta.get("writes") or node.meta.get("overwritten") or changes_each_step(graph, node):
            continue
        if node.op == "placeholder" and "shape" not in node.meta:
            continue  # an object may change inside
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
