"""The smallest bottleneck when ranks also hold and run a VAE and text encoders: cut and placement chosen together."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from partitioners.balanced import (
    TIE_TOLERANCE,
    balanced,
    best_last_start,
    first_that_fits,
    largest_rank,
    smallest_bottleneck,
)
from partitioners.costs import Component, ModelCosts, RankSpec
from partitioners.errors import DoesNotFitError, InvalidCostError
from partitioners.partition import Partition, check_stages
from partitioners.stage_costs import StageCost, stage_seconds, stage_shortfalls


@dataclass(frozen=True)
class Placement:
    """Where the blocks and the components go.

    Args:
        partition: Blocks per stage.
        owners: The rank that holds each component, by name.
        ranks: The ranks with what the components take of them.
    """

    partition: Partition
    owners: Mapping[str, int]
    ranks: tuple[RankSpec, ...]


def vae_aware(costs: ModelCosts, ranks: Sequence[RankSpec]) -> Partition:
    """The cut of `place`: `balanced`, with the components of `costs` as work of the ranks that hold them.

    Args:
        costs: The model and its components.
        ranks: One entry per stage, in pipeline order.

    Raises:
        PartitionError: As `place` does.
    """
    return place(costs, ranks).partition


def place(costs: ModelCosts, ranks: Sequence[RankSpec]) -> Placement:
    """Cut the model and place its components so that the busiest rank is least busy and every rank has the memory.

    This is exact: all placements are considered, by a dynamic programme over the stages whose state is the blocks and
    the set of components placed so far. Where components do as well on the ranks that they prefer, they go there. Ties
    between cuts are broken as `balanced` does.

    It takes 3^(number of components that are not bound to a rank) times as long as `balanced`.

    Args:
        costs: The model and its components.
        ranks: One entry per stage, in pipeline order.

    Raises:
        DoesNotFitError: If no placement fits, with what each rank lacks in the one whose largest shortfall is smallest.
        InvalidCostError: If a component names a rank that is not there.
        TooManyStagesError: If there are more ranks than blocks.
        PartitionError: If components that must be alone leave no rank for the blocks.
    """
    check_stages(costs, ranks)
    _check_ranks(costs.components, len(ranks))
    owners = default_owners(costs.components, len(ranks))
    bound = [component for component in costs.components if component.rank is not None]
    free = [component for component in costs.components if component.rank is None]
    # What is bound to a rank is work of that rank like any other, and leaves nothing to choose.
    given = with_components(ranks, bound, owners)
    open_costs = replace(costs, components=tuple(free))
    owners |= _best_owners(open_costs, given, default_owners(free, len(ranks)))
    loaded = with_components(given, free, owners)
    try:
        return Placement(balanced(costs, loaded), owners, tuple(loaded))
    except DoesNotFitError as error:
        smallest = _smallest_num_ranks(open_costs, given)
        raise DoesNotFitError(error.counts, error.shortfalls, smallest, owners) from None


def default_owners(components: Sequence[Component], num_ranks: int) -> dict[str, int]:
    """The ranks that the components are bound to, or else prefer."""
    return {
        component.name: (component.preferred_rank if component.rank is None else component.rank) % num_ranks
        for component in components
    }


def with_components(
    ranks: Sequence[RankSpec], components: Sequence[Component], owners: Mapping[str, int]
) -> list[RankSpec]:
    """The ranks with the components' bytes and seconds as fixed work of their owners."""
    return [
        _with(rank, [component for component in components if owners[component.name] == index])
        for index, rank in enumerate(ranks)
    ]


def compute_balanced_block_split(
    num_blocks: int, num_stages: int, vae_encode_overhead: float = 0.15, vae_decode_overhead: float = 0.15
) -> list[tuple[int, int]]:
    """Blocks of each stage when the first stage also encodes with the VAE, and the last decodes.

    Stages between get more blocks, so that all are as busy. A stage whose overhead is more than its share of everything
    gets no blocks: its range is empty.

    Args:
        num_blocks: Blocks of the model, all alike.
        num_stages: Stages of the pipeline. A single one does all.
        vae_encode_overhead: Time of the encode as a fraction of the time of all blocks.
        vae_decode_overhead: Time of the decode, likewise.

    Returns:
        The blocks of each stage as (start, end), `end` excluded.

    Raises:
        TooManyStagesError: If there are more stages than blocks.
        PartitionError: If a number is negative, not finite, or of the wrong type.
    """
    for name, number in (("num_blocks", num_blocks), ("num_stages", num_stages)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InvalidCostError(name, number, "an integer of 1 or more")
    components = (
        Component("vae_encode_overhead", vae_encode_overhead, rank=0),
        Component("vae_decode_overhead", vae_decode_overhead, rank=-1),
    )
    costs = ModelCosts.uniform(num_blocks, seconds=1 / num_blocks)
    owners = default_owners(components, num_stages)
    return balanced(costs, with_components([RankSpec()] * num_stages, components, owners)).ranges


def _with(rank: RankSpec, components: Sequence[Component]) -> RankSpec:
    return replace(
        rank,
        fixed_seconds=rank.fixed_seconds + math.fsum(component.seconds for component in components) / rank.speed,
        fixed_bytes=rank.fixed_bytes + sum(component.bytes for component in components),
        holds_blocks=rank.holds_blocks and not any(component.alone for component in components),
    )


def _check_ranks(components: Sequence[Component], num_ranks: int) -> None:
    for component in components:
        if component.rank is not None and not -num_ranks <= component.rank < num_ranks:
            raise InvalidCostError(
                f"Component({component.name!r}).rank", component.rank, f"a rank, which are 0 to {num_ranks - 1}"
            )


def _best_owners(costs: ModelCosts, ranks: Sequence[RankSpec], preferred: Mapping[str, int]) -> Mapping[str, int]:
    """Owners with which some cut is best: what ranks lack in memory counts before time."""
    subsets = [_subset(costs.components, mask) for mask in range(1 << len(costs.components))]
    loaded = [[_with(rank, subset) for rank in ranks] for subset in subsets]
    shortfalls = None
    if any(rank.memory_bytes is not None for rank in ranks):
        shortfalls = [stage_shortfalls(costs, own) for own in loaded]
        lacking, owners = _programme(costs, shortfalls)
        if lacking > 0:
            return _keep_preferred(costs, owners, preferred, shortfalls, lacking)
    seconds = [stage_seconds(costs, own, shortfalls[i] if shortfalls else None) for i, own in enumerate(loaded)]
    busiest, owners = _programme(costs, seconds)
    return _keep_preferred(costs, owners, preferred, seconds, busiest * (1 + TIE_TOLERANCE))


def _programme(costs: ModelCosts, stage_costs: Sequence[Sequence[StageCost]]) -> tuple[float, dict[str, int]]:
    """The smallest possible largest cost of a stage, and owners with which it is reached.

    Args:
        costs: The model and its components.
        stage_costs: For each set of components (as the bits of its index) the cost of every stage that holds the set.
    """
    num_blocks, num_stages, everything = costs.num_blocks, len(stage_costs[0]), len(stage_costs) - 1
    best = {placed: [cost[0](0, end) for end in range(num_blocks + 1)] for placed, cost in enumerate(stage_costs)}
    # chosen[stage][placed][end]: the components of the stage, and where it starts, if `placed` are on ranks up to it.
    chosen: list[dict[int, list[tuple[int, int]]]] = [{placed: [(placed, 0)] * (num_blocks + 1) for placed in best}]
    for stage in range(1, num_stages):
        floors = {placed: list(accumulate(row, min)) for placed, row in best.items()}
        rows: dict[int, list[float]] = {}
        choices: dict[int, list[tuple[int, int]]] = {}
        for before, row in best.items():
            for own in _subsets_of(everything & ~before):
                values = rows.setdefault(before | own, [math.inf] * (num_blocks + 1))
                decided = choices.setdefault(before | own, [(own, 0)] * (num_blocks + 1))
                for end in range(num_blocks + 1):
                    value, start = best_last_start(row, floors[before], stage_costs[own][stage], end, values[end])
                    if value < values[end]:
                        values[end], decided[end] = value, (own, start)
        best = rows
        chosen.append(choices)
    owners: dict[str, int] = {}
    placed, end = everything, num_blocks
    for stage in range(num_stages - 1, -1, -1):
        own, start = chosen[stage][placed][end]
        owners |= {component.name: stage for component in _subset(costs.components, own)}
        placed, end = placed & ~own, start
    return best[everything][num_blocks], owners


def _keep_preferred(
    costs: ModelCosts,
    owners: Mapping[str, int],
    preferred: Mapping[str, int],
    stage_costs: Sequence[Sequence[StageCost]],
    limit: float,
) -> Mapping[str, int]:
    """Move components to the ranks that they prefer as long as some cut stays within the limit."""

    def cost(own: Mapping[str, int]) -> float:
        masks = [0] * len(stage_costs[0])
        for bit, component in enumerate(costs.components):
            masks[own[component.name]] |= 1 << bit
        return smallest_bottleneck(costs.num_blocks, [stage_costs[mask][stage] for stage, mask in enumerate(masks)])

    if cost(preferred) <= limit:
        return preferred
    for name, rank in preferred.items():
        moved = {**owners, name: rank}
        if moved != owners and cost(moved) <= limit:
            owners = moved
    return owners


def _smallest_num_ranks(costs: ModelCosts, ranks: Sequence[RankSpec]) -> int | None:
    """How many ranks hold model and components, if those that are added are like the largest."""
    largest = largest_rank(ranks)
    subsets = [_subset(costs.components, mask) for mask in range(1 << len(costs.components))]

    def fits(num_ranks: int) -> bool:
        more = [*ranks, *[largest] * (num_ranks - len(ranks))]
        loaded = [[_with(rank, subset) for rank in more] for subset in subsets]
        return _programme(costs, [stage_shortfalls(costs, own) for own in loaded])[0] == 0

    return first_that_fits(range(len(ranks) + 1, costs.num_blocks + 1), fits)


def _subset(components: Sequence[Component], mask: int) -> list[Component]:
    return [component for bit, component in enumerate(components) if mask >> bit & 1]


def _subsets_of(mask: int) -> Iterator[int]:
    """All sets of components within `mask`, itself first, the empty one last."""
    subset = mask
    while subset:
        yield subset
        subset = (subset - 1) & mask
    yield 0
