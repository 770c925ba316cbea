"""Cut a batched call into microbatches, and merge their outputs."""

import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.nodes import is_tensor
from dit_pipelining.capture.signature import flatten_inputs
from dit_pipelining.capture.structure import is_namedtuple, tensors_in
from dit_pipelining.torch_internals import version


def batch_size(kwargs: Mapping[str, Any], main_input: str) -> int:
    """Samples in a call: the first dimension of the latents, or their number where they come as a list."""
    latents = kwargs.get(main_input)
    if isinstance(latents, torch.Tensor) and latents.ndim:
        return latents.shape[0]
    return len(latents) if isinstance(latents, list | tuple) else 1


@dataclass(frozen=True)
class Way:
    """One reading of a call's inputs: what in them has one part per sample, beside tensors with the batch in front.

    Attributes:
        shape_lists: lists with an entry per sample and no tensors in them (image sizes).
        tensor_lists: lists with a tensor per sample.
        matrices: tensors of more than one dimension, in calls whose latents come as a list.
        inner: tensors with the batch in another dimension (layers of a text encoder, stacked).
    """

    shape_lists: bool = False
    tensor_lists: bool = False
    matrices: bool = True
    inner: bool = False


Fits = Callable[[Mapping[str, Any], Mapping[str, Any], int], bool]

TENSOR_WAYS = (Way(shape_lists=True), Way(), Way(inner=True), Way(tensor_lists=True), Way(True, True, inner=True))
LIST_WAYS = (Way(True, True, matrices=False), Way(True, True))


class Cutter:
    """Cuts calls into microbatches.

    Nothing tells for sure which inputs have a batch dimension, so readings are tried: the first one is taken with which
    the forward, on tensors without data, does for a part its share of the whole. If none fits the batch stays whole.

    A slice of a tensor is made once for as long as the tensor lives unchanged, so that what the stages keep for the inputs
    of a denoising loop is found again at its next step.

    Args:
        main_input: name of the latents.
        parts: wanted number of microbatches.
        fits: given a call's inputs, those of its first part, and the part's batch size: whether the forward takes the
            part and does its share of the whole with it.
    """

    def __init__(self, main_input: str, parts: int, fits: Fits = lambda whole, part, size: True) -> None:
        self.main_input = main_input
        self.parts = parts
        self.fits = fits
        self._ways: dict[Hashable, Way | None] = {}
        self._slices: dict[tuple[int, int, int, int], tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def cut(self, kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Cut a call into at most the wanted number of equal microbatches; fewer where the batch does not divide.

        Tensors whose first dimension is the batch are cut, wherever they stand in the inputs; so are lists with one entry
        per sample if the latents come as such a list. All else (position ids, a timestep for all) goes to every
        microbatch. A batch whose size is the second dimension of some input too stays whole, since either could be meant;
        so does one that comes with an object (a cache), which holds what belongs to the whole batch.
        """
        size = batch_size(kwargs, self.main_input)
        count = math.gcd(size, self.parts)
        if count == 1:
            return [dict(kwargs)]
        inputs = flatten_inputs(kwargs)
        if inputs.signature not in self._ways:
            self._ways[inputs.signature] = None if inputs.objects else self._way(kwargs, size, size // count)
        way = self._ways[inputs.signature]
        return [dict(kwargs)] if way is None else self._cut(kwargs, way, size, size // count)

    def _way(self, kwargs: Mapping[str, Any], size: int, step: int) -> Way | None:
        if self._is_ambiguous(kwargs, size):
            return None
        ways = TENSOR_WAYS if isinstance(kwargs[self.main_input], torch.Tensor) else LIST_WAYS
        return next((way for way in ways if self.fits(kwargs, self._cut(kwargs, way, size, step)[0], step)), None)

    def _is_ambiguous(self, kwargs: Mapping[str, Any], size: int) -> bool:
        """Whether the first two dimensions of an input are both as long as the batch, so that either could be it.

        Of a matrix the second one are its features (the two numbers of a size, of a batch of two).
        """
        others = {name: value for name, value in kwargs.items() if name != self.main_input}
        return any(tensor.ndim > 2 and tensor.shape[0] == tensor.shape[1] == size for tensor in tensors_in(others))

    def _cut(self, kwargs: Mapping[str, Any], way: Way, size: int, step: int) -> list[dict[str, Any]]:
        def part(value: Any, start: int) -> Any:
            if isinstance(value, torch.Tensor):
                dim = _batch_dim(value, way, size)
                return value if dim is None else self._slice(value, dim, start, step)
            if isinstance(value, dict):
                return {name: part(item, start) for name, item in value.items()}
            if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
                if len(value) == size and _is_per_sample(value, way):
                    return value[start : start + step]
                items = (part(item, start) for item in value)
                return type(value)(*items) if is_namedtuple(value) else type(value)(items)
            return value

        def named_part(name: str, value: Any, start: int) -> Any:
            if name == self.main_input and not isinstance(value, torch.Tensor):
                return value[start : start + step]
            return part(value, start)

        starts = range(0, size, step)
        return [{name: named_part(name, value, start) for name, value in kwargs.items()} for start in starts]

    def _slice(self, tensor: torch.Tensor, dim: int, start: int, step: int) -> torch.Tensor:
        key, now = (id(tensor), dim, start, step), version(tensor)
        known = self._slices.get(key)
        if known is not None and now >= 0 and known[0]() is tensor and known[1] == now:
            return known[2]
        made = tensor.narrow(dim, start, step)
        if now >= 0:
            self._slices[key] = weakref.ref(tensor, lambda _: self._slices.pop(key, None)), now, made.detach()
            return self._slices[key][2]
        return made


def _batch_dim(tensor: torch.Tensor, way: Way, size: int) -> int | None:
    if tensor.ndim and tensor.shape[0] == size and (way.matrices or tensor.ndim == 1):
        return 0
    inner = [dim for dim, length in enumerate(tensor.shape) if length == size] if way.inner else []
    return inner[0] if len(inner) == 1 else None


def _is_per_sample(values: Sequence[Any], way: Way) -> bool:
    if any(True for _ in tensors_in(values)):
        return way.tensor_lists and all(isinstance(value, torch.Tensor | list | tuple) for value in values)
    return way.shape_lists and all(isinstance(value, list | tuple) for value in values)


def is_share(whole: BlockGraph, part: BlockGraph, count: int) -> bool:
    """Whether the graph of a part calls the blocks that the whole calls, on at most 1 / `count` of the numbers.

    Its outputs have to be a `count`-th of the whole's along their first dimension, or in number, and no objects: a cache
    of keys and values has another dimension in front, and two caches cannot be merged.

    A forward may fold samples that it should not have got into the sequence (`view(batch, -1, dim)`): outputs then have
    the right shape and the wrong values, but the blocks get longer sequences.
    """
    calls = [[node for node in graph.nodes if "block" in node.meta] for graph in (whole, part)]
    if [node.target for node in calls[0]] != [node.target for node in calls[1]] or whole.output_objects:
        return False
    outputs = [[node.meta["shape"] for node in graph.output_nodes] for graph in (whole, part)]
    if len(outputs[0]) != len(outputs[1]):
        if len(outputs[0]) != count * len(outputs[1]):
            return False
    elif any(not other or other[0] != count * own[0] for other, own in zip(*outputs, strict=True)):
        return False
    return all(_elements(own) * count <= _elements(other) for other, own in zip(*calls, strict=True))


def _elements(block: fx.Node) -> int:
    values = [block] if is_tensor(block) else [user for user in block.users if is_tensor(user)]
    return sum(math.prod(value.meta["shape"]) for value in values)


def gives_batch(output: Any, size: int) -> bool:
    """Whether every tensor in an output, or its stand-in with a shape, has this batch size, so that `merge` joins them."""
    if isinstance(output, list):
        return len(output) == size
    if isinstance(output, tuple):
        return all(gives_batch(item, size) for item in output)
    if isinstance(output, Mapping):
        return all(gives_batch(item, size) for item in output.values())
    shape = getattr(output, "shape", None)
    return shape is None or (len(shape) > 0 and shape[0] == size)


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
        merged = [merge(items) for items in zip(*outputs, strict=True)]
        return type(first)(*merged) if is_namedtuple(first) else tuple(merged)
    return first
