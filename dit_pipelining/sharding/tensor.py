"""Tensor parallelism: a transformer whose blocks compute a part of their heads and hidden width on each rank.

[Note: plain tensors]
A rank's part of a weight is an ordinary tensor and the sums are explicit, where `torch.distributed.tensor.parallel` would
put DTensors: blocks then run on fake tensors while the forward is captured, their weights are read, moved and counted like
all others, and inputs and outputs of a block are the same as without tensor parallelism, whole on each rank.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.tensor_layers import NORMS, Shard, cut_layer
from dit_pipelining.sharding.tensor_names import Rotary
from dit_pipelining.sharding.tensor_plans import TensorPlan, tensor_plan


def check_tensor_parallel(model: nn.Module, size: int, blocks: Sequence[str]) -> TensorPlan:
    """Check that a transformer can be cut over `size` ranks, with weights or without.

    Args:
        model: the transformer.
        size: number of ranks.
        blocks: names of its blocks.

    Raises:
        ConfigError: it cannot; says what stands in the way, and which sizes work.
    """
    plan = tensor_plan(model, blocks)
    wrong = [f"{name}" for name, count in plan.units.items() if count % size]
    if wrong:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide {wrong[0]} = {plan.units[wrong[0]]} of {type(model).__name__}"
            f"{f' (nor {len(wrong) - 1} more)' if len(wrong) > 1 else ''}. Sizes that work: "
            f"{', '.join(map(str, plan.sizes()))}."
        )
    for name, cut in plan.layers.items():
        layer = type(model.get_submodule(name))
        if cut.style == "norm" and (layer.__module__, layer.__name__) not in NORMS:
            raise ConfigError(
                f"tensor_parallel_size: {name} of {type(model).__name__} is a {layer.__name__} over all heads, and it is not "
                "known how to compute it over ranks. Use pipeline_parallel_size."
            )
    return plan


def apply_tensor_parallel(model: nn.Module, group: dist.ProcessGroup, blocks: Sequence[str]) -> dict[str, Shard]:
    """Cut a transformer over the ranks of a group, in place; every rank of the group calls this.

    Args:
        model: the transformer, with weights (the same on every rank) or without.
        group: the ranks. Their blocks must run at the same time, in the same order.
        blocks: names of its blocks.

    Returns:
        which part of a tensor this rank holds, by the tensor's name, for those that are cut.

    Raises:
        ConfigError: it cannot be cut over so many ranks.
    """
    size = dist.get_world_size(group)
    plan = check_tensor_parallel(model, size, blocks)
    shards: dict[str, Shard] = {}
    for name, cut in plan.layers.items():
        own = cut_layer(model.get_submodule(name), cut, group)
        shards |= {f"{name}.{key}": shard for key, shard in own.items()}
    for name, attributes in plan.counts.items():
        module = model.get_submodule(name)
        for attribute in attributes:
            if isinstance(count := getattr(module, attribute, None), int):
                setattr(module, attribute, count // size)
    for name, rotary in plan.rotary.items():
        hook = _cut_rotary(rotary, dist.get_rank(group), size)
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    return shards


def refuse_additions(model: nn.Module, known: frozenset[str], setting: str = "tensor_parallel_size") -> None:
    """Refuse weights that came into a model after it was cut: they would be whole where others are not.

    Args:
        model: the cut transformer or text encoder.
        known: names of the tensors of its state dict when it was cut.
        setting: of the configuration, that had it cut.

    Raises:
        ConfigError: names the first of them.
    """
    added = sorted(set(model.state_dict(keep_vars=True)) - known)
    if added:
        raise ConfigError(
            f"{type(model).__name__} got {added[0]!r} after it was cut over ranks ({setting}), which covers the model's own "
            f"weights only. Fuse adapters into the weights before (fuse_lora, then parallelize), or leave {setting} at 1"
            f"{' and use pipeline_parallel_size' if setting == 'tensor_parallel_size' else ''}."
        )


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _cut_rotary(rotary: Rotary, index: int, count: int) -> Callable[[nn.Module, Any, Any], Arguments]:
    """A hook that gives an attention module its heads' part of rotary tables."""

    def part(table: torch.Tensor) -> torch.Tensor:
        return table.chunk(count, rotary.dims[table.ndim])[index]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        tables = {name: kwargs[name] for name in rotary.arguments if kwargs.get(name) is not None}
        return args, {**kwargs, **{name: tuple(map(part, table)) for name, table in tables.items()}}

    return hook
