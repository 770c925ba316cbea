"""Random weights: enough to measure how long something takes."""

from collections.abc import Iterable

import torch
from torch import nn

from dit_pipelining.weights.load import owner_and_key, tensor_names

SPREAD = 0.02
"""Standard deviation of matrices, as transformers are initialised. Zeros would do for time, but not for power: a GPU that
multiplies zeros runs faster."""


def fill_randomly(model: nn.Module, weights: Iterable[str], device: torch.device) -> None:
    """Give modules and parameters random weights on a device; vectors become ones, buffers move there.

    Args:
        model: built without weights.
        weights: names of modules (all their tensors), parameters and buffers. What else the model has stays as it is.
        device: where the tensors go.
    """
    names = list(weights)
    buffers = dict(model.named_buffers())
    for name in tensor_names(model, names):
        owner, key = owner_and_key(model, name)
        if key in owner._parameters:
            owner._parameters[key] = nn.Parameter(_random(getattr(owner, key), device), requires_grad=False)
    inside = tuple(f"{name}." for name in names)
    for name, buffer in buffers.items():  # also those that are in no checkpoint
        if name in names or name.startswith(inside):
            owner, key = owner_and_key(model, name)
            owner._buffers[key] = _random(buffer, device) if buffer.is_meta else buffer.to(device)


def _random(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    if not like.is_floating_point():
        return made.zero_()
    return made.normal_(std=SPREAD) if like.ndim > 1 else made.fill_(1.0)
