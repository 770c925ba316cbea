"""Quantised linear layers while a forward is recorded: shapes and work of the plain layer stand for them.

Their kernels want weights with values, scales and states that tensors without data do not have, and that a layer of another
rank, or one whose weights are yet to be read, does not have either.
"""

from typing import Any

import torch
from torch import nn

LAYERS = ("bitsandbytes.", "diffusers.quantizers.")
"""Packages whose linear layers hold quantised weights; torchao quantises the weight of a plain one."""

CASTING = "diffusers.quantizers.gguf."
"""Where the layers are from that give their results in a dtype of their own; the others give the input's."""


def is_quantised_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weight is quantised, or will be once it is read."""
    if not isinstance(module, nn.Linear):
        return False
    return type(module).__module__.startswith(LAYERS) or type(module.weight).__module__.startswith("torchao.")


def like_quantised_linear(module: Any, input: torch.Tensor) -> torch.Tensor:
    """A tensor like the one that the layer gives for `input`, (..., in features), on fake tensors."""
    dtype = module.compute_dtype if type(module).__module__.startswith(CASTING) else input.dtype
    input = input.to(dtype)
    bias = None if module.bias is None else input.new_empty(module.out_features)
    return nn.functional.linear(input, input.new_empty(module.out_features, module.in_features), bias)
