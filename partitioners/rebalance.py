"""A better partition from measured stage times."""

import math
from collections.abc import Sequence
from dataclasses import replace

from partitioners.balanced import balanced
from partitioners.costs import ModelCosts, RankSpec
from partitioners.errors import InvalidCostError
from partitioners.partition import Partition, Partitioner

MINIMUM_GAIN = 0.1
"""Moving weights costs time too, and measured times scatter: a new partition must promise at least this much."""


class BlockScheduler:
    """Proposes new partitions while a model runs, from what its stages were measured to take.

    A stage that took longer than its blocks should is on a slower rank: the measured time over the predicted one gives
    the rank's speed, and the partitioner cuts anew for these speeds. There is hysteresis: a proposal must be faster than
    the present partition by `minimum_gain`, and one that was tried and measured no faster is not proposed again.

    Args:
        costs: The model. Only the ratios of its seconds matter.
        ranks: One entry per stage; their speeds are where it starts from.
        partition: What runs now.
        partitioner: Cuts anew.
        minimum_gain: By which share the busiest stage must take longer now than after the change.

    Attributes:
        partition: What runs now, as far as the scheduler knows: the last one that it proposed, or the first.
        ranks: With the speeds that were measured last.

    Raises:
        CountsError: If the partition is not one of this model over these ranks.
        InvalidCostError: If `minimum_gain` is negative or not finite.
    """

    def __init__(
        self,
        costs: ModelCosts,
        ranks: Sequence[RankSpec],
        partition: Partition,
        *,
        partitioner: Partitioner = balanced,
        minimum_gain: float = MINIMUM_GAIN,
    ) -> None:
        partition.check(costs, ranks)
        if not isinstance(minimum_gain, int | float) or not 0 <= minimum_gain < math.inf:
            raise InvalidCostError("minimum_gain", minimum_gain, "a finite number of 0 or more")
        self.costs = costs
        self.ranks = tuple(ranks)
        self.partition = partition
        self.partitioner = partitioner
        self.minimum_gain = minimum_gain
        self._attention_backend: str | None = None
        self._measured: dict[tuple[int, ...], float] = {}

    def collect_timing_and_rebalance(
        self, stage_seconds: Sequence[float | None], *, attention_backend: str | None = None
    ) -> Partition | None:
        """Take in measured times; returns a partition to change to, or None where the present one shall stay.

        Args:
            stage_seconds: What each stage took per call, without transfers and waiting. None, zero, negative and
                non-finite times are not valid; as long as a stage has no valid time, nothing is proposed.
            attention_backend: With which the times were measured. With another one than before, what was measured
                earlier no longer counts.

        Raises:
            InvalidCostError: If there are not as many times as stages.
        """
        if len(stage_seconds) != len(self.ranks):
            raise InvalidCostError("stage_seconds", stage_seconds, f"{len(self.ranks)} times, one per stage")
        if attention_backend != self._attention_backend:
            self._attention_backend = attention_backend
            self._measured.clear()
        seconds = [time for time in stage_seconds if time is not None and math.isfinite(time) and time > 0]
        if len(seconds) < len(self.ranks):
            return None
        self.ranks = tuple(self._with_speed(stage, time) for stage, time in enumerate(seconds))
        present = self.partition.bottleneck(self.costs, self.ranks)
        self._measured[self.partition.counts] = present
        proposed = self.partitioner(self.costs, self.ranks)
        expected = proposed.bottleneck(self.costs, self.ranks)
        if proposed == self.partition or present < expected * (1 + self.minimum_gain):
            return None
        if present < self._measured.get(proposed.counts, 0.0) * (1 + self.minimum_gain):
            return None
        self.partition = proposed
        return proposed

    def _with_speed(self, stage: int, seconds: float) -> RankSpec:
        """The rank of a stage with the speed that the measured time means; a stage without blocks tells nothing."""
        rank = self.ranks[stage]
        if not self.partition.counts[stage]:
            return rank
        predicted = math.fsum(cost.seconds for cost in self.partition.stage_work(self.costs)[stage])
        return replace(rank, speed=predicted / seconds) if predicted > 0 else rank
