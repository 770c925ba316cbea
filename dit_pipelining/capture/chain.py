"""The main chain of a captured forward: the block calls that the latents run through, one after the other."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx


class _Chain(NamedTuple):
    length: int
    switches: int  # negative: fewer changes between block lists compare as larger
    calls: tuple["fx.Node", ...]

    @property
    def rank(self) -> tuple[int, int]:
        return self.length, self.switches


def main_chain(graph: fx.Graph, calls: Sequence[fx.Node], main_input: str) -> list[fx.Node]:
    """The longest path through block calls that depend on the latents.

    Calls on the longest path have to run one after the other; all others (WanVACE's hint blocks, text refiners, the text
    stacks of Kandinsky) are side branches. Of equally long paths the one that changes least often between block lists is
    taken, so that a chain of hint blocks is not mistaken for the beginning of the main one.

    Args:
        graph: in execution order.
        calls: the block calls in it.
        main_input: name of the input that holds the latents. If no call depends on it, every call may belong to the chain.
    """
    depends = _depends_on(graph, main_input)
    eligible = {call for call in calls if call in depends} or set(calls)
    best: dict[fx.Node, dict[str, _Chain]] = {}  # node -> name of the last call's list -> best chain that ends there
    for node in graph.nodes:
        chains: dict[str, _Chain] = {}
        for source in node.all_input_nodes:
            for name, chain in best[source].items():
                if name not in chains or chain.rank > chains[name].rank:
                    chains[name] = chain
        if node in eligible:
            own = str(node.meta["block"]).rpartition(".")[0]
            extended = [
                _Chain(chain.length + 1, chain.switches - (name != own), (*chain.calls, node))
                for name, chain in chains.items()
            ]
            chains = {own: max(extended, key=lambda chain: chain.rank, default=_Chain(1, 0, (node,)))}
        best[node] = chains
    every = [chain for chains in best.values() for chain in chains.values()]
    return list(max(every, key=lambda chain: chain.rank).calls)


def _depends_on(graph: fx.Graph, main_input: str) -> set[fx.Node]:
    depends: set[fx.Node] = set()
    for node in graph.nodes:
        path = node.meta.get("input", "") if node.op == "placeholder" else ""
        if path.split(".")[0] == main_input or any(source in depends for source in node.all_input_nodes):
            depends.add(node)
    return depends
