"""The smallest bottleneck, by an exact dynamic programme."""

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from partitioners.costs import ModelCosts, RankSpec
from partitioners.errors import DoesNotFitError, PartitionError
from partitioners.partition import Partition, check_stages
from partitioners.stage_costs import StageCost, stage_seconds, stage_shortfalls

TIE_TOLERANCE = 1e-9
"""Bottlenecks this close, relative to the smallest, count as equal: sums of floats differ by more than nothing."""


def balanced(costs: ModelCosts, ranks: Sequence[RankSpec]) -> Partition:
    """The partition whose busiest stage is least busy, among those that fit into every rank's memory.

    How busy a stage is and what it must hold are `Partition.stage_seconds` and `Partition.stage_bytes`. A rank gets no
    blocks only where each partition with fewer empty stages is slower. Partitions that are equally fast are told apart
    by, in this order: fewer empty stages; fewer bytes over all boundaries; the smallest largest count, then the
    smallest second largest, and so on; extra blocks where `uniform` would put them. So equal blocks on equal ranks are
    split as `uniform` splits them.

    It takes O(stages * blocks^2) steps at worst, mostly far fewer.

    Args:
        costs: The model.
        ranks: One entry per stage, in pipeline order.

    Raises:
        DoesNotFitError: If no partition fits, with what each rank lacks in the one whose largest shortfall is smallest.
        TooManyStagesError: If there are more ranks than blocks.
        PartitionError: If there are no ranks, or none that may hold blocks.
    """
    check_stages(costs, ranks)
    if not any(rank.holds_blocks for rank in ranks):
        raise PartitionError("no rank is left to hold blocks; let one of the ranks hold some, or add a rank")
    if any(rank.memory_bytes is not None for rank in ranks):
        shortfall_costs = stage_shortfalls(costs, ranks)
        shortfall = smallest_bottleneck(costs.num_blocks, shortfall_costs)
        if shortfall > 0:
            counts = _first_of_ties(costs, shortfall_costs, shortfall)
            shortfalls = Partition(counts, allow_empty=True).shortfalls(costs, ranks)
            raise DoesNotFitError(counts, shortfalls, _smallest_num_ranks(costs, ranks))
    else:
        shortfall_costs = None
    stage_costs = stage_seconds(costs, ranks, shortfall_costs)
    seconds = smallest_bottleneck(costs.num_blocks, stage_costs)
    return Partition(_first_of_ties(costs, stage_costs, seconds * (1 + TIE_TOLERANCE)), allow_empty=True)


def smallest_bottleneck(num_blocks: int, stage_costs: Sequence[StageCost]) -> float:
    """The smallest possible largest stage cost, empty stages included."""
    first, *others = stage_costs
    best = [first(0, end) for end in range(num_blocks + 1)]
    for stage_cost in others:
        floors = list(accumulate(best, min))
        best = [best_last_start(best, floors, stage_cost, end)[0] for end in range(num_blocks + 1)]
    return best[num_blocks]


def best_last_start(
    best: Sequence[float], floors: Sequence[float], stage_cost: StageCost, end: int, bound: float = math.inf
) -> tuple[float, int]:
    """The smallest bottleneck of the first `end` blocks, and where the last stage starts for that.

    Args:
        best: The smallest bottleneck of the stages before the last, for each start of the last.
        floors: For each start, the smallest of `best` up to there.
        stage_cost: The last stage's.
        end: Where the last stage ends.
        bound: What is known to be possible; if nothing is smaller, this is returned, with `end`.
    """
    smallest, chosen = bound, end
    for start in range(end, -1, -1):
        cost = stage_cost(start, end)
        # Every smaller start costs this stage as much or more, and the stages before it as much as the floor or more.
        if cost >= smallest or floors[start] >= smallest:
            break
        value = max(cost, best[start])
        if value < smallest:
            smallest, chosen = value, start
    return smallest, chosen


# [Note: ties as one integer]
# The rules that tell ties apart are sums over the stages, compared one after the other. Packed into one integer, most
# important rule in the highest bits, they add and compare at the speed of integers. "Smallest largest count, then
# smallest second largest, ..." is a sum too: a stage of n blocks adds 1 to digit n of a number whose digits are wide
# enough for the number of stages, so the number is the histogram of the counts, with the largest count's digit on top.


def _first_of_ties(costs: ModelCosts, stage_costs: Sequence[StageCost], limit: float) -> tuple[int, ...]:
    """Among the partitions whose stages all cost at most `limit`, the counts of the one that `balanced` prefers."""
    num_blocks, num_stages = costs.num_blocks, len(stage_costs)
    boundaries = [costs.boundary_bytes(end) for end in range(num_blocks + 1)]

    # Where extra blocks go: the stage before the last is the cheapest place, then backwards; the last is the dearest.
    places = [*range(num_stages - 2, -1, -1), num_stages - 1]
    digit = num_stages.bit_length()
    evenness_shift = (num_blocks * num_stages).bit_length()
    boundary_shift = evenness_shift + digit * (num_blocks + 1)
    empty_shift = boundary_shift + (max(boundaries) * num_stages).bit_length()
    unreachable = 1 << (empty_shift + digit)

    keys = [0] + [unreachable] * num_blocks
    chosen_starts = []
    for stage, stage_cost in enumerate(stage_costs):
        # steps[num_blocks - count]: what a stage of `count` blocks adds.
        steps = [(1 << (evenness_shift + digit * count)) + places[stage] * count for count in range(num_blocks, -1, -1)]
        steps[num_blocks] += 1 << empty_shift
        row, starts = [], []
        for end in range(num_blocks + 1):
            first = bisect_left(range(end + 1), True, key=lambda start: stage_cost(start, end) <= limit)
            candidates = list(map(operator.add, keys[first : end + 1], steps[num_blocks - end + first :]))
            smallest = min(candidates, default=unreachable)
            starts.append(first + candidates.index(smallest) if candidates else end)
            row.append(smallest + (boundaries[end] << boundary_shift if stage < num_stages - 1 else 0))
        keys = row
        chosen_starts.append(starts)

    counts = []
    end = num_blocks
    for starts in reversed(chosen_starts):
        counts.append(end - starts[end])
        end = starts[end]
    return tuple(reversed(counts))


def _smallest_num_ranks(costs: ModelCosts, ranks: Sequence[RankSpec]) -> int | None:
    """How many ranks hold the model, if those that are added are like the largest; None if one per block is too few."""
    largest = largest_rank(ranks)

    def fits(num_ranks: int) -> bool:
        more = [*ranks, *[largest] * (num_ranks - len(ranks))]
        return smallest_bottleneck(costs.num_blocks, stage_shortfalls(costs, more)) == 0

    return first_that_fits(range(len(ranks) + 1, costs.num_blocks + 1), fits)


def largest_rank(ranks: Sequence[RankSpec]) -> RankSpec:
    """What a rank that is added could be: as much memory as the largest, and no other work than all ranks have."""
    largest = max(ranks, key=lambda rank: math.inf if rank.memory_bytes is None else rank.memory_bytes)
    return replace(largest, fixed_bytes=min(rank.fixed_bytes for rank in ranks), holds_blocks=True)


def first_that_fits(candidates: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first number of ranks that is enough: if one is, so is every larger one."""
    index = bisect_left(candidates, True, key=fits)
    return candidates[index] if index < len(candidates) else None
