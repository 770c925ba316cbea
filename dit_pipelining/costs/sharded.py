"""What a rank holds of blocks whose weights are sharded over several."""

import math
from dataclasses import replace

from partitioners import ModelCosts

WHOLE_BLOCKS = 2
"""Blocks whose weights HSDP holds whole: the one that computes, and the next."""


def held_when_sharded(weights: float, shards: int) -> tuple[float, float]:
    """Bytes that a rank keeps of a block's weights, and those that it has beside while the block runs."""
    kept = weights / shards
    return kept, WHOLE_BLOCKS * (weights - kept)


def sharded_over(costs: ModelCosts, shards: int) -> ModelCosts:
    """Costs of a model of whose blocks each rank keeps a share; what lies outside of the blocks stays whole."""
    if shards == 1:
        return costs
    blocks = []
    for cost in costs.blocks:
        kept, gathered = held_when_sharded(cost.parameter_bytes, shards)
        activations = cost.activation_bytes + math.ceil(gathered)
        blocks.append(replace(cost, parameter_bytes=math.ceil(kept), activation_bytes=activations))
    return replace(costs, blocks=tuple(blocks))
