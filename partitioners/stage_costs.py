"""What every run of blocks would cost on every stage: what the dynamic programmes choose from."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

from partitioners.costs import ModelCosts, RankSpec

StageCost: TypeAlias = Callable[[int, int], float]
"""What blocks start to end cost on one stage. Never grows when start moves towards end."""


def stage_seconds(
    costs: ModelCosts, ranks: Sequence[RankSpec], shortfalls: Sequence[StageCost] | None
) -> list[StageCost]:
    """Per stage, seconds of a run of blocks; infinite where it lacks memory."""
    num_blocks = costs.num_blocks
    elapsed = list(accumulate((block.seconds for block in costs.blocks), initial=0.0))

    def of_stage(stage: int, rank: RankSpec) -> StageCost:
        speed = rank.speed
        glue = math.fsum(cost.seconds for cost in costs.glue(stage, len(ranks)))
        besides = [rank.fixed_seconds] * (num_blocks + 1)
        if stage < len(ranks) - 1:
            besides = [
                rank.fixed_seconds + rank.transfer_seconds(costs.boundary_bytes(end)) for end in range(num_blocks + 1)
            ]
        first_start = _first_starts(num_blocks, shortfalls[stage]) if shortfalls else [0] * (num_blocks + 1)

        def seconds(start: int, end: int) -> float:
            if start < first_start[end] or (start < end and not rank.holds_blocks):
                return math.inf
            return (elapsed[end] - elapsed[start] + glue) / speed + besides[end]

        return seconds

    return [of_stage(stage, rank) for stage, rank in enumerate(ranks)]


def stage_shortfalls(costs: ModelCosts, ranks: Sequence[RankSpec]) -> list[StageCost]:
    """Per stage, the bytes that a rank lacks for a run of blocks."""
    weights = list(accumulate((block.parameter_bytes for block in costs.blocks), initial=0))
    activations = [block.activation_bytes for block in costs.blocks]
    # peaks[start][end - start]: the largest activation of blocks start to end.
    peaks = [list(accumulate(activations[start:], max, initial=0)) for start in range(costs.num_blocks + 1)]

    def of_stage(stage: int, rank: RankSpec) -> StageCost:
        limit = rank.memory_bytes
        glue = costs.glue(stage, len(ranks))
        held = sum(cost.parameter_bytes for cost in glue) + costs.replicated_bytes + rank.fixed_bytes
        glue_peak = max((cost.activation_bytes for cost in glue), default=0)

        def shortfall(start: int, end: int) -> float:
            if start < end and not rank.holds_blocks:
                return math.inf
            if limit is None:
                return 0
            need = weights[end] - weights[start] + held + max(peaks[start][end - start], glue_peak)
            return need - limit if need > limit else 0

        return shortfall

    return [of_stage(stage, rank) for stage, rank in enumerate(ranks)]


def _first_starts(num_blocks: int, shortfall: StageCost) -> list[int]:
    """For each end, the smallest start from which the blocks fit; end + 1 where not even an empty stage fits."""
    starts = []
    start = 0
    for end in range(num_blocks + 1):
        while start <= end and shortfall(start, end) > 0:
            start += 1
        starts.append(start)
    return starts
