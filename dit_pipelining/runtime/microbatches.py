"""Cut a batched call into microbatches, and merge their outputs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def batch_size(kwargs: Mapping[str, Any], main_input: str) -> int:
    """Samples in a call: the first dimension of the latents, or their number where they come as a list."""
    latents = kwargs.get(main_input)
    if isinstance(latents, torch.Tensor) and latents.ndim:
        return latents.shape[0]
    return len(latents) if isinstance(latents, list | tuple) else 1


def cut(kwargs: Mapping[str, Any], main_input: str, wanted: int) -> list[dict[str, Any]]:
    """Cut a call into at most `wanted` equal microbatches; fewer where the batch does not divide.

    Tensors whose first dimension is the batch are cut, wherever they stand in the inputs; so are lists with one entry
    per sample if the latents come as such a list. All else (position ids, a timestep for all) goes to every microbatch.
    """
    size = batch_size(kwargs, main_input)
    count = math.gcd(size, wanted)
    if count == 1:
        return [dict(kwargs)]
    per_sample_lists = not isinstance(kwargs[main_input], torch.Tensor)
    step = size // count

    def part(value: Any, start: int) -> Any:
        if isinstance(value, torch.Tensor):
            batched = not per_sample_lists or value.ndim == 1
            return value[start : start + step] if value.ndim and value.shape[0] == size and batched else value
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            if per_sample_lists and len(value) == size:
                return value[start : start + step]
            return type(value)(part(item, start) for item in value)
        if isinstance(value, dict):
            return {name: part(item, start) for name, item in value.items()}
        return value

    return [{name: part(value, start) for name, value in kwargs.items()} for start in range(0, size, step)]


def merge(outputs: Sequence[Any]) -> Any:
    """One output like the unsplit call's from those of its microbatches."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, list):  # one entry per sample
        return [item for output in outputs for item in output]
    if isinstance(first, dict):  # diffusers' output classes are such
        return type(first)(**{name: merge([output[name] for output in outputs]) for name in first})
    if isinstance(first, tuple):
        return tuple(merge(items) for items in zip(*outputs, strict=True))
    return first
