"""Choose the ranks of text encoders and VAE before the shapes of a call are known: by weights alone.

Components are loaded before the first call, and the cut waits for it. Until then the bytes of the blocks are known, which
decide what fits, and seconds are as good as proportional to them.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.costs.machine import Machine, Rank
from dit_pipelining.costs.roofline import Roofline
from partitioners import BlockCost, Component, ModelCosts, RankSpec, place


def owners_by_weight(
    models: Iterable[nn.Module], blocks: Sequence[str] | None, machine: Machine, components: Sequence[Component]
) -> Mapping[str, int]:
    """The stage whose rank shall hold each component.

    Args:
        models: the transformers, with weights or without; every rank holds a stage of each.
        blocks: names of their blocks, see `find_blocks`.
        machine: its ranks.
        components: text encoders and VAE. Their seconds do not count.

    Raises:
        DoesNotFitError: model and components do not fit, however they are placed, even without activations.
        PartitionError: there are more stages than blocks.
    """
    costs = [_weight_costs(model, find_blocks(model, blocks)) for model in models]
    longest = max(costs, key=lambda own: own.num_blocks)
    elsewhere = sum(_bytes(own) for own in costs if own is not longest) // len(machine.ranks)
    together = ModelCosts(longest.blocks, longest.prologue, replicated_bytes=elsewhere, components=tuple(components))
    return place(together, [_rank_spec(rank, machine) for rank in machine.ranks]).owners


def _weight_costs(model: nn.Module, names: Sequence[str]) -> ModelCosts:
    sizes = [sum(p.numel() * p.element_size() for p in model.get_submodule(name).parameters()) for name in names]
    rest = max(sum(p.numel() * p.element_size() for p in model.parameters()) - sum(sizes), 0)
    return ModelCosts(tuple(BlockCost(float(size), size) for size in sizes), BlockCost(0.0, rest))


def _bytes(costs: ModelCosts) -> int:
    return costs.prologue.parameter_bytes + sum(block.parameter_bytes for block in costs.blocks)


def _rank_spec(rank: Rank, machine: Machine) -> RankSpec:
    if rank.spec is not None:
        return rank.spec
    speed = rank.speed
    if rank.device is not None and isinstance(machine.timing, Roofline):
        speed *= rank.device.bfloat16_flops_per_second / machine.timing.device.bfloat16_flops_per_second
    return RankSpec(speed, rank.memory_bytes)
