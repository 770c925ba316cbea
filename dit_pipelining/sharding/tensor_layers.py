"""Layers that hold this rank's part of a weight, and sum over the ranks where the whole is needed.

An existing layer becomes one of these in place, by its class: its name, its hooks and what else was set on it stay.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dit_pipelining.sharding.groups import split_sizes
from dit_pipelining.sharding.tensor_plans import LayerCut
from dit_pipelining.torch_internals import sum_over_ranks


@dataclass(frozen=True)
class Shard:
    """Which part of a tensor a rank holds.

    Attributes:
        dim: along which it is cut.
        parts: sizes of the stretches along `dim` that are each cut, as evenly as can be: the first ranks get one more.
        index: of this rank.
        count: of ranks.
        shape: of the whole tensor.
    """

    dim: int
    parts: tuple[int, ...]
    index: int
    count: int
    shape: tuple[int, ...]

    def of(self, whole: Any) -> torch.Tensor:
        """This rank's part of a tensor, or of a slice of a safetensors file, of which nothing else is read then."""
        pieces, start = [], 0
        for part in self.parts:
            sizes = split_sizes(part, self.count)
            begin = start + sum(sizes[: self.index])
            pieces.append(whole[(slice(None),) * self.dim + (slice(begin, begin + sizes[self.index]),)])
            start += part
        return torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].contiguous()

    @property
    def size(self) -> int:
        """This rank's part of the dimension that is cut."""
        return sum(split_sizes(part, self.count)[self.index] for part in self.parts)


class OverRanks(nn.Module):
    """A layer of which each rank of a group holds a part. What is pickled of it is the plain layer, without the group."""

    group: dist.ProcessGroup

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = next(cls for cls in type(self).__mro__ if not issubclass(cls, OverRanks))
        return _blank, (plain,), {key: own for key, own in self.__dict__.items() if key != "group"}


def _blank(cls: Any) -> Any:
    return cls.__new__(cls)


class RowParallelLinear(OverRanks, nn.Linear):
    """A linear layer over this rank's inputs; the sum over the ranks is the layer's output, whole on each of them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        summed = sum_over_ranks(F.linear(input, self.weight), self.group)
        return summed if self.bias is None else summed + self.bias


class ParallelRMSNorm(nn.RMSNorm):
    """torch's RMSNorm over the channels of all ranks. It computes in float32, as torch's kernels do."""

    group: dist.ProcessGroup
    full_width: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        scaled = wide * torch.rsqrt(_mean_square(wide, self) + eps)
        return (scaled if self.weight is None else scaled * self.weight).to(x.dtype)


class ParallelDiffusersRMSNorm(nn.Module):
    """diffusers' RMSNorm over the channels of all ranks, with its casts."""

    group: dist.ProcessGroup
    full_width: int
    eps: float
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = hidden_states.dtype
        scaled = hidden_states * torch.rsqrt(_mean_square(hidden_states.float(), self) + self.eps)
        if self.weight is None:
            return scaled.to(dtype)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            scaled = scaled.to(self.weight.dtype)
        scaled = scaled * self.weight
        return scaled if self.bias is None else scaled + self.bias


class ParallelLayerNorm(nn.LayerNorm):
    """torch's LayerNorm over the channels of all ranks."""

    group: dist.ProcessGroup
    full_width: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        centred = wide - sum_over_ranks(wide.sum(-1, keepdim=True), self.group) / self.full_width
        scaled = centred * torch.rsqrt(_mean_square(centred, self) + self.eps)
        if self.weight is not None:
            scaled = scaled * self.weight
        return (scaled if self.bias is None else scaled + self.bias).to(input.dtype)


def _mean_square(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return sum_over_ranks(x.pow(2).sum(-1, keepdim=True), norm.group) / norm.full_width


NORMS: dict[tuple[str, str], type[nn.Module]] = {
    ("torch.nn.modules.normalization", "RMSNorm"): ParallelRMSNorm,
    ("torch.nn.modules.normalization", "LayerNorm"): ParallelLayerNorm,
    ("diffusers.models.normalization", "RMSNorm"): ParallelDiffusersRMSNorm,
}
"""What a norm over all heads becomes, by module and name of its class."""


def cut_layer(layer: nn.Module, cut: LayerCut, group: dist.ProcessGroup) -> dict[str, Shard]:
    """Leave a layer this rank's part of its weights; what it held of the others is freed.

    Args:
        layer: a linear layer or norm, with weights or without.
        cut: how.
        group: the ranks over which it is cut.

    Returns:
        which part of each of its tensors the rank holds, by the tensor's name in the layer; those that stay whole are left
        out.
    """
    index, count = dist.get_rank(group), dist.get_world_size(group)
    shards: dict[str, Shard] = {}
    for name, parameter in layer.named_parameters(recurse=False):
        if cut.style == "row" and name == "bias":
            continue
        dim = 1 if cut.style == "row" else 0
        shards[name] = shard = Shard(dim, cut.parts, index, count, tuple(parameter.shape))
        setattr(layer, name, part_of(parameter, shard))
    local = Shard(0, cut.parts, index, count, ()).size
    if cut.style == "column":
        layer.out_features = local  # type: ignore[assignment]
    elif cut.style == "row":
        layer.in_features = local  # type: ignore[assignment]
        layer.__class__ = RowParallelLinear
        layer.group = group  # type: ignore[assignment]
    else:
        layer.__class__ = NORMS[type(layer).__module__, type(layer).__name__]
        layer.group, layer.full_width = group, sum(cut.parts)  # type: ignore[assignment]
        if hasattr(layer, "normalized_shape"):
            layer.normalized_shape = (local,)  # type: ignore[assignment]
    return shards


def part_of(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """A parameter with a part of this one's data, in memory of its own."""
    own = shard.of(parameter.detach())
    own = own.clone() if own.untyped_storage().nbytes() > own.numel() * own.itemsize else own
    return nn.Parameter(own, requires_grad=parameter.requires_grad)
