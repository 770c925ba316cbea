"""Token embeddings and layers that make logits, cut by the vocabulary: each rank has the rows of a run of its tokens."""

import functools
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dit_pipelining.sharding.groups import gather_parts, split_sizes
from dit_pipelining.sharding.tensor_layers import OverRanks, Shard, part_of
from dit_pipelining.torch_internals import sum_over_ranks


class EmbeddingPart(OverRanks, nn.Embedding):
    """An embedding of this rank's tokens; the others' are zeros, so that the sum over the ranks keeps every bit."""

    first: int
    vocabulary: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = input - self.first
        # A token that is in no vocabulary stays out of range, and raises what it raises in one process.
        elsewhere = ((own < 0) | (own >= self.num_embeddings)) & (input >= 0) & (input < self.vocabulary)
        found = super().forward(own.masked_fill(elsewhere, 0))
        return sum_over_ranks(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)


class LogitsPart(OverRanks, nn.Linear):
    """Logits of this rank's tokens, joined with those of the other ranks."""

    vocabulary: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logits = F.linear(input, self.weight, self.bias)
        return gather_parts(logits, -1, split_sizes(self.vocabulary, self.group.size()), self.group)


def cut_vocabulary(
    layer: Any, group: dist.ProcessGroup, tied: MutableMapping[nn.Parameter, nn.Parameter]
) -> dict[str, Shard]:
    """Leave an embedding, or a layer that makes logits, the rows of this rank's tokens.

    Args:
        layer: an `nn.Embedding` or `nn.Linear`, with weights or without.
        group: the ranks over which it is cut.
        tied: parts of weights that were cut before, by the whole ones, which other layers may have too; it is added to.

    Returns:
        which part of each of its tensors the rank holds, by the tensor's name in the layer.
    """
    index, count = dist.get_rank(group), dist.get_world_size(group)
    whole = layer.weight.shape[0]
    shards = {}
    for name, parameter in layer.named_parameters(recurse=False):
        shards[name] = shard = Shard(0, (whole,), index, count, tuple(parameter.shape))
        if parameter not in tied:
            tied[parameter] = part_of(parameter, shard)
        setattr(layer, name, tied[parameter])
    sizes = split_sizes(whole, count)
    is_embedding = isinstance(layer, nn.Embedding)
    cls: Any = type(layer)
    layer.__class__ = _embedding_part(cls) if is_embedding else LogitsPart
    layer.group, layer.vocabulary = group, whole
    if is_embedding:
        layer.num_embeddings, layer.first = sizes[index], sum(sizes[:index])
        layer.padding_idx = None  # it is for training, and a number in the whole vocabulary
    else:
        layer.out_features = sizes[index]
    return shards


@functools.cache
def _embedding_part(cls: Any) -> Any:
    """The class of a part of such an embedding, which may do more than look up: Gemma's scales."""
    return type(cls.__name__, (EmbeddingPart, cls), {"__module__": cls.__module__})
