"""Keep the replicas that share sharded weights in step; see [Note: passes] in sharding/hsdp.py.

All ranks of a line submit the same calls in the same order, and know which replica runs which. So each knows, without asking,
how many passes every replica has made. Replicas may differ by those that are in flight side by side, the branches of a step;
before anybody waits for a result, and before a call gathers other blocks, replicas that are behind catch up with passes in
which they only take part.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.lowering.stage import StageModule


class Lockstep:
    """Counts the passes of the replicas whose ranks share weights with this rank's.

    Args:
        replicas: those.
        own: this rank's.
    """

    def __init__(self, replicas: Sequence[int], own: int) -> None:
        self._behind = dict.fromkeys(replicas, 0)
        self._own = own
        self._last: tuple[StageModule, BlockGraph] | None = None
        self._key: Any = None

    def before(
        self, stage: StageModule, graph: BlockGraph, replica: int, run: Callable[[Callable[[], None]], None]
    ) -> None:
        """Called before each call is submitted, on every rank; `run` puts a function among the calls of this rank."""
        if stage.sharded is None:
            return
        key = (id(stage.model), tuple(str(node.target) for node in graph.blocks))
        if key != self._key:
            self.catch_up(run)
        self._last, self._key = (stage, graph), key
        if replica in self._behind:
            self._behind[replica] += 1

    def catch_up(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Let all replicas have made as many passes."""
        missing = max(self._behind.values(), default=0) - self._behind.get(self._own, 0)
        self._behind = dict.fromkeys(self._behind, 0)
        if self._last is None:
            return
        stage, graph = self._last
        for _ in range(missing):
            run(lambda: stage.gather_only(graph))
