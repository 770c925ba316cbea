"""Every partition of small models, judged by formulas of its own: what `balanced` is measured against."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from partitioners import ModelCosts, RankSpec

Preference: TypeAlias = tuple[float, int, int, list[int], int]


def all_counts(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut `num_blocks` into `num_stages` runs, empty ones included."""
    if num_stages == 1:
        yield (num_blocks,)
        return
    for count in range(num_blocks + 1):
        for others in all_counts(num_blocks - count, num_stages - 1):
            yield (count, *others)


def cut_bytes(costs: ModelCosts, counts: Sequence[int]) -> list[int]:
    """What crosses from each stage but the last."""
    after = [costs.prologue.boundary_bytes, *(block.boundary_bytes for block in costs.blocks)]
    return [after[sum(counts[: stage + 1])] for stage in range(len(counts) - 1)]


def busiest(costs: ModelCosts, ranks: Sequence[RankSpec], counts: Sequence[int]) -> float:
    """Seconds of the busiest stage."""
    crossing = cut_bytes(costs, counts)
    blocks = list(costs.blocks)
    seconds = []
    for stage, (count, rank) in enumerate(zip(counts, ranks, strict=True)):
        compute = sum(blocks.pop(0).seconds for _ in range(count))
        if stage == 0:
            compute += costs.prologue.seconds
        if stage == len(ranks) - 1:
            compute += costs.epilogue.seconds
        total = compute / rank.speed + rank.fixed_seconds
        if stage < len(ranks) - 1:
            total += rank.link_latency_seconds
            if rank.link_bytes_per_second is not None:
                total += crossing[stage] / rank.link_bytes_per_second
        seconds.append(total)
    return max(seconds)


def lacking(costs: ModelCosts, ranks: Sequence[RankSpec], counts: Sequence[int]) -> list[int]:
    """Bytes that each rank lacks."""
    blocks = list(costs.blocks)
    shortfalls = []
    for stage, (count, rank) in enumerate(zip(counts, ranks, strict=True)):
        held = [blocks.pop(0) for _ in range(count)]
        if stage == 0:
            held.append(costs.prologue)
        if stage == len(ranks) - 1:
            held.append(costs.epilogue)
        need = sum(cost.parameter_bytes for cost in held) + max((cost.activation_bytes for cost in held), default=0)
        need += costs.replicated_bytes + rank.fixed_bytes
        shortfalls.append(0 if rank.memory_bytes is None else max(0, need - rank.memory_bytes))
    return shortfalls


def preference(costs: ModelCosts, ranks: Sequence[RankSpec], counts: Sequence[int]) -> Preference:
    """Smaller is better: bottleneck, empty stages, boundary bytes, evenness, then where the extra blocks are."""
    places = [*range(len(counts) - 2, -1, -1), len(counts) - 1]
    return (
        busiest(costs, ranks, counts),
        sum(count == 0 for count in counts),
        sum(cut_bytes(costs, counts)),
        sorted(counts, reverse=True),
        sum(place * count for place, count in zip(places, counts, strict=True)),
    )
