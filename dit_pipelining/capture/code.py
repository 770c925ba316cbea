"""From the nodes of a captured graph to a Python function that runs them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

Function = Callable[..., tuple[Any, ...]]


def compile_nodes(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], arguments: Sequence[fx.Node], constants: Mapping[str, Any]
) -> Function:
    """A function `f(root, *arguments) -> tuple` that runs `nodes` in order and returns `outputs`.

    Args:
        nodes: what to run, in execution order; nodes among `arguments` are left out.
        outputs: the values to return.
        arguments: the values to take, in order.
        constants: values of the graph's `_constants.*` targets, bound into the function. All other modules and
            parameters are looked up on `root` by their names when the function runs.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in arguments:
        copied[node] = graph.placeholder(node.name)
    used: dict[fx.Node, Any] = {}
    for node in nodes:
        if node in copied:
            continue
        if node.op == "get_attr" and node.target in constants:
            copied[node] = graph.placeholder(node.name)
            used[copied[node]] = constants[str(node.target)]
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in outputs))
    return _function(graph, list(used.values()))


def _function(graph: fx.Graph, constants: list[Any]) -> Function:
    _move_placeholders_first(graph)
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<stage>", "exec"), namespace)
    forward = namespace["forward"]
    if not constants:
        return forward

    def with_constants(root: Any, *arguments: Any) -> tuple[Any, ...]:
        return forward(root, *arguments, *constants)

    return with_constants


def _move_placeholders_first(graph: fx.Graph) -> None:
    """Code generation names a function's arguments in the order of the placeholders, wherever they stand."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in reversed(placeholders):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)
