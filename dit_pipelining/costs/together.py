"""Transformers of one pipeline: they take turns on the same ranks, so each is cut with the weights of the others in mind."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from dit_pipelining.comm.layout import Layout
from dit_pipelining.costs.inside import parameter_bytes
from partitioners import BlockCost, ModelCosts


@dataclass(frozen=True)
class Others:
    """What the ranks hold of a pipeline's other transformers while one is cut.

    Attributes:
        alike: how many are like it. They are cut alike, so that a rank holds as many blocks of each.
        rank_bytes: weights of the rest on each rank: an even share.
    """

    alike: int = 0
    rank_bytes: int = 0


NO_OTHERS = Others()


def others_of(
    model: nn.Module,
    others: Iterable[nn.Module],
    num_stages: int,
    layout: Layout,
    shards: int = 1,
    blocks: Sequence[str] | None = None,
) -> Others:
    """What the ranks hold beside one transformer.

    Args:
        model: the transformer, of which nothing is cut, with weights or without.
        others: the pipeline's other transformers, likewise.
        num_stages: of each.
        layout: how many ranks share what of a stage.
        shards: ranks over which HSDP keeps the weights of each block.
        blocks: names of their blocks, see `find_blocks`.
    """
    own = _kind(model)
    found = [(other, _kind(other) == own) for other in others]
    rest = [parameter_bytes(other, layout, shards, blocks) for other, is_alike in found if not is_alike]
    held = sum(sum(sizes.values()) for sizes in rest)
    return Others(len(found) - len(rest), math.ceil(held / num_stages))


def with_others(costs: ModelCosts, others: Others) -> ModelCosts:
    """The costs of one transformer, with the weights of those beside it."""
    if others == NO_OTHERS:
        return costs

    def held(cost: BlockCost) -> BlockCost:
        return replace(cost, parameter_bytes=cost.parameter_bytes * (1 + others.alike))

    return replace(
        costs,
        blocks=tuple(map(held, costs.blocks)),
        prologue=held(costs.prologue),
        epilogue=held(costs.epilogue),
        replicated_bytes=costs.replicated_bytes * (1 + others.alike) + others.rank_bytes,
    )


def _kind(model: nn.Module) -> object:
    return type(model), {name: (tuple(own.shape), own.dtype) for name, own in model.named_parameters()}
