"""Rebalancing: when the blocks of a stream had better lie on other ranks, and how they get there."""

from collections.abc import Sequence

from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.executor import TransformerExecutor
from partitioners import Partition

ATTENTION = "a stream's"
"""Told to the scheduler as the attention's backend: times of a stream and of other calls are not compared."""


class Rebalancing:
    """The BlockScheduler of a transformer, asked in the middle of a stream.

    Every stage notes its time per tick in the headers that pass; when they have come around to the first rank, it asks. What
    it asked with goes to the others, who ask the same and come to the same partition.

    Args:
        executor: of the transformer, with `rebalance=True`.
    """

    def __init__(self, executor: TransformerExecutor) -> None:
        self.executor = executor

    def seconds_per_tick(self) -> float | None:
        """What this rank's stage was measured to take; None before it is known."""
        assert self.executor.rebalancer is not None
        return self.executor.rebalancer.clock.seconds_per_call()

    def better_partition(self, seconds: Sequence[float]) -> Partition | None:
        """A partition that is worth a move; zeros are times that are not known yet."""
        assert self.executor.rebalancer is not None
        return self.executor.rebalancer.scheduler.collect_timing_and_rebalance(seconds, attention_backend=ATTENTION)

    def move(self, partition: Partition) -> SplitModel:
        """Move the weights; all ranks call this while nothing is in flight."""
        return self.executor.repartition(partition)


def stages_of_blocks(split: SplitModel) -> dict[str, int]:
    """The stage of each block by the block's name."""
    names = [str(node.target) for node in split.graph.blocks]
    return {
        names[block]: stage for stage, (start, end) in enumerate(split.partition.ranges) for block in range(start, end)
    }
