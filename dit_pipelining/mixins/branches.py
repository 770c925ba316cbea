"""Branches of guidance: who computes which, and their predictions as tuples."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

logger = logging.getLogger("dit_pipelining.mixins")

Prediction: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""What a transformer predicts: one tensor, or several (video and audio)."""

Tensors: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class CfgRanks:
    """The pipelines that share the branches.

    Attributes:
        world_size: their number; 1 where each pipeline computes all branches itself.
        rank: of this one.
        group: gathers tensors from them: `all_gather(tensor, separate_tensors=True)`.
    """

    world_size: int = 1
    rank: int = 0
    group: Any = None


def as_tuple(prediction: Prediction) -> Tensors:
    return prediction if isinstance(prediction, tuple) else (prediction,)


def from_tuple(tensors: Tensors) -> Prediction:
    """The only tensor of a tuple of one, or the tuple."""
    return tensors[0] if len(tensors) == 1 else tensors


def sliced(tensors: Tensors, output_slice: int | None) -> Tensors:
    """The first `output_slice` tokens (dimension 1) of each tensor: an edited image's own, without the reference's."""
    return tensors if output_slice is None else tuple(tensor[:, :output_slice] for tensor in tensors)


def dispatch_branches(n_branches: int, n_ranks: int) -> list[list[int]]:
    """The branches of each rank: branch i is rank i % n_ranks's."""
    return [list(range(rank, n_branches, n_ranks)) for rank in range(n_ranks)]


def branches_of(n_branches: int, ranks: CfgRanks) -> list[int]:
    """The branches that this rank computes; one without any repeats the last, since it must gather something of that shape."""
    if ranks.world_size > n_branches:
        warn_once(
            f"cfg_parallel_size={ranks.world_size} is more than the {n_branches} branches of guidance: "
            f"{ranks.world_size - n_branches} pipeline(s) repeat one"
        )
    return dispatch_branches(n_branches, ranks.world_size)[ranks.rank] or [n_branches - 1]


def gather_branches(own: Sequence[Tensors], n_branches: int, ranks: CfgRanks) -> list[Tensors]:
    """All branches' predictions, on every rank, in the order of the branches.

    Args:
        own: predictions of `branches_of` this rank.
        n_branches: of all ranks.
        ranks: the pipelines.
    """
    turns = -(-n_branches // ranks.world_size)
    padded = [*own, *[tuple(torch.zeros_like(tensor) for tensor in own[0])] * (turns - len(own))]
    gathered = [
        [ranks.group.all_gather(tensor, separate_tensors=True) for tensor in prediction]
        for prediction in padded[:turns]
    ]
    return [
        tuple(by_rank[branch % ranks.world_size] for by_rank in gathered[branch // ranks.world_size])
        for branch in range(n_branches)
    ]


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning, the first time: loops would repeat it every step."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
