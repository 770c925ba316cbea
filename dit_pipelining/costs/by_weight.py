"""Choose the ranks of text encoders and VAE before the shapes of a call are known: by weights alone.

Components are loaded before the first call, and the cut waits for it. Until then the bytes of the blocks are known, which
decide what fits, and seconds are as good as proportional to them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.comm.layout import ONE_RANK, Layout
from dit_pipelining.costs.inside import parameter_bytes
from dit_pipelining.costs.machine import Machine, Rank
from dit_pipelining.costs.roofline import Roofline
from dit_pipelining.costs.together import others_of, with_others
from partitioners import BlockCost, Component, ModelCosts, RankSpec, place


def owners_by_weight(
    models: Iterable[nn.Module],
    blocks: Sequence[str] | None,
    machine: Machine,
    components: Sequence[Component],
    layout: Layout = ONE_RANK,
    shards: int = 1,
) -> Mapping[str, int]:
    """The stage whose rank shall hold each component.

    Args:
        models: the transformers, of which nothing is cut, with weights or without; every rank holds a stage of each.
        blocks: names of their blocks, see `find_blocks`.
        machine: its ranks.
        components: text encoders and VAE. Their seconds do not count.
        layout: how many ranks share what of a stage.
        shards: ranks over which HSDP keeps the weights of each block.

    Raises:
        DoesNotFitError: model and components do not fit, however they are placed, even without activations.
        PartitionError: there are more stages than blocks.
    """
    longest, *rest = sorted(models, key=lambda model: -len(find_blocks(model, blocks)))
    costs = _weight_costs(find_blocks(longest, blocks), parameter_bytes(longest, layout, shards, blocks))
    costs = with_others(costs, others_of(longest, rest, len(machine.ranks), layout, shards, blocks))
    ranks = [_rank_spec(rank, machine) for rank in machine.ranks]
    return place(replace(costs, components=tuple(components)), ranks).owners


def _weight_costs(blocks: Sequence[str], held: Mapping[str, float]) -> ModelCosts:
    sizes = [sum(size for name, size in held.items() if name.startswith(f"{block}.")) for block in blocks]
    rest = math.ceil(max(sum(held.values()) - sum(sizes), 0))
    return ModelCosts(tuple(BlockCost(size, math.ceil(size)) for size in sizes), BlockCost(0.0, rest))


def _rank_spec(rank: Rank, machine: Machine) -> RankSpec:
    if rank.spec is not None:
        return rank.spec
    speed = rank.speed
    if rank.device is not None and isinstance(machine.timing, Roofline):
        speed *= rank.device.bfloat16_flops_per_second / machine.timing.device.bfloat16_flops_per_second
    return RankSpec(speed, rank.memory_bytes)
