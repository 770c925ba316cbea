"""Move weights between the ranks of a pipeline, when its blocks are distributed anew.

[Note: moved weights]
Weights go from the rank that has them to the ranks that need them, also where they once came from a checkpoint: what is in
memory is what the model computes with now, adapters and fused or edited weights included. They travel through host memory
over the control group (this happens rarely, and between two calls of the pipeline). A tensor arrives with its strides, and
at an address that has the same remainder by a cache line: on the CPU the last bits of matrix products depend on that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.errors import ConfigError
from dit_pipelining.weights.load import owner_and_key

CACHE_LINE = 64
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True)
class _Layout:
    """What the receiver of a tensor has to know."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    remainder: int
    requires_grad: bool


def move_weights(
    model: nn.Module,
    before: Sequence[frozenset[str]],
    after: Sequence[frozenset[str]],
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Give every rank the weights of its stage, and drop what it no longer needs. All ranks of the group call this.

    Args:
        model: of which each rank holds a part.
        before: names of the modules, parameters and buffers that each stage holds now.
        after: likewise, of what it shall hold.
        ranks: of this rank's replica, in the order of its stages.
        group: of all ranks, over gloo.
        device: of this rank.

    Raises:
        ConfigError: a weight is quantised, or of another class that cannot be sent.
    """
    check_movable(model)
    stage = list(ranks).index(dist.get_rank())
    held = [_names(model, weights) for weights in before]
    needed = [_names(model, weights) for weights in after]
    transfers = []
    for name in _tensor_names(model):  # in one order on all ranks, which sets do not have
        if not any(name in names for names in needed):
            continue
        source = next(own for own, names in enumerate(held) if name in names)
        targets = [own for own, names in enumerate(needed) if name in names and name not in held[own]]
        transfers += [(name, source, target) for target in targets]
    own = {name: _layout(_tensor(model, name)) for name, source, _ in transfers if source == stage}
    layouts: list[dict[str, _Layout]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(layouts, own, group)
    last_sent = {name: index for index, (name, source, _) in enumerate(transfers) if source == stage}
    for index, (name, source, target) in enumerate(transfers):
        if stage == source:
            _send(_tensor(model, name), ranks[target], group)
            if last_sent[name] == index and name not in needed[stage]:
                _drop(model, name)
        elif stage == target:
            _receive(model, name, layouts[ranks[source]][name], ranks[source], group, device)
    for name in held[stage] - needed[stage]:
        _drop(model, name)


def check_movable(model: nn.Module) -> None:
    """Check that all weights are ordinary tensors.

    Raises:
        ConfigError: names one that is not.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in PLAIN:
            raise ConfigError(
                f"rebalance=True: {type(model).__name__}'s {name!r} is a {type(tensor).__name__}, and only ordinary tensors "
                "can be moved between ranks. Leave rebalance out for quantised models."
            )


def _tensor_names(model: nn.Module) -> list[str]:
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))]


def _names(model: nn.Module, weights: frozenset[str]) -> set[str]:
    """Names of all parameters and buffers in these modules, or that these are."""
    prefixes = tuple(f"{name}." for name in weights)
    return {name for name in _tensor_names(model) if name in weights or name.startswith(prefixes)}


def _layout(tensor: torch.Tensor) -> _Layout:
    stride = tensor.stride() if _is_dense(tensor) else tensor.contiguous().stride()
    remainder = tensor.data_ptr() % CACHE_LINE
    return _Layout(tuple(tensor.shape), stride, tensor.dtype, remainder, tensor.requires_grad)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in whatever order of dimensions."""
    expected = 1
    for length, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def _send(tensor: torch.Tensor, target: int, group: dist.ProcessGroup) -> None:
    if tensor.numel() == 0:
        return
    dense = tensor.detach() if _is_dense(tensor) else tensor.detach().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,)).cpu()
    dist.send(flat.view(torch.uint8), target, group=group)


def _receive(
    model: nn.Module, name: str, layout: _Layout, source: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    size = torch.Size(layout.shape).numel() * layout.dtype.itemsize
    memory = torch.empty(size + CACHE_LINE, dtype=torch.uint8)
    start = (layout.remainder - memory.data_ptr()) % CACHE_LINE
    data = memory[start : start + size]
    if size:
        dist.recv(data, source, group=group)
    value = data.view(layout.dtype).as_strided(layout.shape, layout.stride, data.view(layout.dtype).storage_offset())
    owner, key = owner_and_key(model, name)
    if device.type != "cpu":
        value = value.to(device)
    if key in owner._parameters:
        owner._parameters[key] = nn.Parameter(value, requires_grad=layout.requires_grad)
    else:
        owner._buffers[key] = value


def _drop(model: nn.Module, name: str) -> None:
    """Free a parameter's memory. Buffers stay: they are small, and some glue looks at them on every rank."""
    owner, key = owner_and_key(model, name)
    parameter = owner._parameters.get(key)
    if parameter is not None and parameter.device.type != "meta":
        owner._parameters[key] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    owner, key = owner_and_key(model, name)
    found: Any = getattr(owner, key)
    return found
