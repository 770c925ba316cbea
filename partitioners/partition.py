"""Partition: how many blocks each stage runs, and what that means in seconds and bytes."""

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate
from typing import TypeAlias

from partitioners.costs import BlockCost, ModelCosts, RankSpec
from partitioners.errors import (
    ARGUMENT,
    CountsNotIntegersError,
    EmptyStageError,
    NegativeCountError,
    NoCountsError,
    PartitionError,
    TooManyStagesError,
    WrongNumberOfCountsError,
    WrongSumError,
)


@dataclass(frozen=True)
class Partition:
    """Contiguous runs of blocks, one per stage, in order.

    Args:
        counts: Number of blocks of each stage; printed as vLLM's VLLM_PP_LAYER_PARTITION writes it, such as `7,8,8,7`.
        allow_empty: Whether a stage may have no blocks.

    Raises:
        CountsNotIntegersError: If a count is not an integer.
        NegativeCountError: If a count is negative.
        EmptyStageError: If a count is 0 and `allow_empty` is False.
        PartitionError: If there are no stages.
    """

    counts: tuple[int, ...]
    allow_empty: InitVar[bool] = field(default=False, kw_only=True)

    def __post_init__(self, allow_empty: bool) -> None:
        counts = check_counts(self.counts)
        object.__setattr__(self, "counts", counts)
        if not allow_empty and 0 in counts:
            raise EmptyStageError(counts, ARGUMENT, counts.index(0))

    def __str__(self) -> str:
        return ",".join(str(count) for count in self.counts)

    @property
    def num_stages(self) -> int:
        return len(self.counts)

    @property
    def num_blocks(self) -> int:
        return sum(self.counts)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The blocks of each stage as (start, end), `end` excluded; an empty stage has start == end."""
        ends = list(accumulate(self.counts))
        return [(end - count, end) for count, end in zip(self.counts, ends, strict=True)]

    def stage_of(self, block: int) -> int:
        """The stage that runs `block`, counted from 0.

        Raises:
            PartitionError: If there is no such block.
        """
        if not 0 <= block < self.num_blocks:
            raise PartitionError(f"there is no block {block}; this partition has blocks 0 to {self.num_blocks - 1}")
        # Not bisect_left: an empty stage ends where the stage before it ends, and owns nothing.
        return bisect_right(list(accumulate(self.counts)), block)

    def check(self, costs: ModelCosts, ranks: Sequence[RankSpec], *, source: str = ARGUMENT) -> None:
        """Check that this partition is one of this model over these ranks.

        Args:
            costs: The model.
            ranks: One entry per stage.
            source: Where the counts came from, for the error's sentence.

        Raises:
            WrongNumberOfCountsError: If it has more or fewer stages than there are ranks.
            WrongSumError: If it has more or fewer blocks than the model.
        """
        if self.num_stages != len(ranks):
            raise WrongNumberOfCountsError(self.counts, source, len(ranks))
        if self.num_blocks != costs.num_blocks:
            raise WrongSumError(self.counts, source, costs.num_blocks)

    def stage_work(self, costs: ModelCosts) -> list[tuple[BlockCost, ...]]:
        """What each stage runs: its blocks and its glue."""
        return [
            costs.blocks[start:end] + costs.glue(stage, self.num_stages)
            for stage, (start, end) in enumerate(self.ranges)
        ]

    def compute_seconds(self, costs: ModelCosts, ranks: Sequence[RankSpec]) -> list[float]:
        """Seconds that each rank computes per transformer call."""
        self.check(costs, ranks)
        return [
            math.fsum(cost.seconds for cost in work) / rank.speed
            for work, rank in zip(self.stage_work(costs), ranks, strict=True)
        ]

    def stage_seconds(self, costs: ModelCosts, ranks: Sequence[RankSpec]) -> list[float]:
        """Seconds that each rank is busy per transformer call.

        That is the compute time of its blocks and glue over the rank's speed, plus its fixed seconds, plus the transfer
        of what it sends on. The last rank sends nothing; a rank without blocks relays what it received.
        """
        computing = self.compute_seconds(costs, ranks)
        cuts = [end for _, end in self.ranges[:-1]]
        sending = [rank.transfer_seconds(costs.boundary_bytes(end)) for end, rank in zip(cuts, ranks, strict=False)]
        return [
            seconds + rank.fixed_seconds + beside
            for seconds, rank, beside in zip(computing, ranks, [*sending, 0.0], strict=True)
        ]

    def stage_bytes(self, costs: ModelCosts, ranks: Sequence[RankSpec]) -> list[int]:
        """Bytes that each rank needs: weights (its own and the replicated ones), fixed bytes, largest activation."""
        self.check(costs, ranks)
        needs = []
        for work, rank in zip(self.stage_work(costs), ranks, strict=True):
            weights = sum(cost.parameter_bytes for cost in work) + costs.replicated_bytes
            needs.append(weights + rank.fixed_bytes + max((cost.activation_bytes for cost in work), default=0))
        return needs

    def shortfalls(self, costs: ModelCosts, ranks: Sequence[RankSpec]) -> list[int]:
        """Bytes that each rank lacks; 0 where it has enough or no limit."""
        needs = self.stage_bytes(costs, ranks)
        limits = [
            need if rank.memory_bytes is None else rank.memory_bytes for need, rank in zip(needs, ranks, strict=True)
        ]
        return [max(need - limit, 0) for need, limit in zip(needs, limits, strict=True)]

    def bottleneck(self, costs: ModelCosts, ranks: Sequence[RankSpec]) -> float:
        """Seconds of the busiest stage: in a full pipeline, the time from one result to the next."""
        return max(self.stage_seconds(costs, ranks))


Partitioner: TypeAlias = Callable[[ModelCosts, Sequence[RankSpec]], Partition]
"""Decides where to cut: one `RankSpec` per stage, in pipeline order."""


def check_counts(counts: Sequence[int], *, source: str = ARGUMENT) -> tuple[int, ...]:
    """Block counts as a tuple of plain integers.

    Raises:
        CountsNotIntegersError: If one is not an integer (1.0 and True are not).
        NegativeCountError: If one is negative.
        NoCountsError: If there are none.
    """
    checked = []
    for count in counts:
        try:
            integer = operator.index(count)
        except TypeError:
            raise CountsNotIntegersError(counts, source, count) from None
        if isinstance(count, bool):
            raise CountsNotIntegersError(counts, source, count)
        if integer < 0:
            raise NegativeCountError(counts, source, integer)
        checked.append(integer)
    if not checked:
        raise NoCountsError(counts, source)
    return tuple(checked)


def check_stages(costs: ModelCosts, ranks: Sequence[RankSpec]) -> None:
    """Check that every rank could get a block.

    Raises:
        TooManyStagesError: If there are more ranks than blocks.
        PartitionError: If there are no ranks.
    """
    if not ranks:
        raise PartitionError("there are no ranks to place the model on; give one RankSpec per stage")
    if len(ranks) > costs.num_blocks:
        raise TooManyStagesError(len(ranks), costs.num_blocks)
