"""Real configurations with random weights and inputs, for benchmarks."""

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from torch import nn

from dit_pipelining.planning.inputs import build_inputs
from dit_pipelining.planning.presets import Preset
from dit_pipelining.torch_internals import tree_map
from dit_pipelining.weights.empty import empty_model


def random_transformer(
    facts: Preset,
    device: torch.device,
    changes: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Module:
    """A preset's transformer; the same weights on every device of a kind.

    Args:
        facts: the preset.
        device: where the weights go.
        changes: arguments of the class that differ from the preset's: fewer blocks save time where they are alike.
        dtype: of the weights.
    """
    config = {**facts.config, **(changes or {})}
    model = empty_model(getattr(diffusers, facts.model_class), config, dtype)
    random = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            module._parameters[name] = nn.Parameter(value.normal_(0, 0.02, generator=random), requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return model


def random_inputs(described: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A call's inputs on the GPU: normal values in place of zeros, all else as described."""
    random = torch.Generator(device).manual_seed(1)

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        random_values = leaf.is_floating_point() and leaf.ndim > 1 and not leaf.any()  # a mask is of ones
        leaf = leaf.to(device)
        return leaf.normal_(generator=random) if random_values else leaf

    made: dict[str, Any] = tree_map(fill, build_inputs(described))
    return made
