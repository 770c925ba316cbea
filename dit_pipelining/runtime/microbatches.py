"""Cut a batched call into microbatches, and merge their outputs."""

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dit_pipelining.capture.structure import tensors_in
from dit_pipelining.torch_internals import version


def batch_size(kwargs: Mapping[str, Any], main_input: str) -> int:
    """Samples in a call: the first dimension of the latents, or their number where they come as a list."""
    latents = kwargs.get(main_input)
    if isinstance(latents, torch.Tensor) and latents.ndim:
        return latents.shape[0]
    return len(latents) if isinstance(latents, list | tuple) else 1


class Cutter:
    """Cuts calls into microbatches.

    A slice of a tensor is made once for as long as the tensor lives unchanged, so that what the stages keep for the inputs
    of a denoising loop is found again at its next step.

    Args:
        main_input: name of the latents.
        parts: wanted number of microbatches.
    """

    def __init__(self, main_input: str, parts: int) -> None:
        self.main_input = main_input
        self.parts = parts
        self._slices: dict[tuple[int, int, int], tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def cut(self, kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Cut a call into at most the wanted number of equal microbatches; fewer where the batch does not divide.

        Tensors whose first dimension is the batch are cut, wherever they stand in the inputs; so are lists with one entry
        per sample if the latents come as such a list. All else (position ids, a timestep for all) goes to every
        microbatch. A batch whose size is the second dimension of some input too stays whole, since either could be meant.
        """
        size = batch_size(kwargs, self.main_input)
        count = math.gcd(size, self.parts)
        if count == 1 or _is_ambiguous(kwargs, size):
            return [dict(kwargs)]
        per_sample_lists = not isinstance(kwargs[self.main_input], torch.Tensor)
        step = size // count

        def part(value: Any, start: int) -> Any:
            if isinstance(value, torch.Tensor):
                batched = not per_sample_lists or value.ndim == 1
                return self._slice(value, start, step) if value.ndim and value.shape[0] == size and batched else value
            if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
                if per_sample_lists and len(value) == size:
                    return value[start : start + step]
                return type(value)(part(item, start) for item in value)
            if isinstance(value, dict):
                return {name: part(item, start) for name, item in value.items()}
            return value

        return [{name: part(value, start) for name, value in kwargs.items()} for start in range(0, size, step)]

    def _slice(self, tensor: torch.Tensor, start: int, step: int) -> torch.Tensor:
        key, now = (id(tensor), start, step), version(tensor)
        known = self._slices.get(key)
        if known is not None and now >= 0 and known[0]() is tensor and known[1] == now:
            return known[2]
        made = tensor[start : start + step]
        if now >= 0:
            self._slices[key] = weakref.ref(tensor, lambda _: self._slices.pop(key, None)), now, made.detach()
            return self._slices[key][2]
        return made


def _is_ambiguous(kwargs: Mapping[str, Any], size: int) -> bool:
    """Whether an input's first two dimensions are both as long as the batch, so that either could be it."""
    return size > 1 and any(
        tensor.ndim > 1 and tensor.shape[0] == tensor.shape[1] == size for tensor in tensors_in(dict(kwargs))
    )


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
