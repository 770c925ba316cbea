"""Take nested results apart into a small header and flat bytes, and put them together again on another rank.

[Note: memory of a result]
A rank that receives a result gets its tensors with the strides, the sharing of memory and the alignment that they have on
the rank that made it: kernels can round differently for another layout, and a view must stay a view. So what travels is,
of each memory that the result's tensors lie in, the part from the first to the last byte they use.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from dit_pipelining.torch_internals import storage_key

ALIGNMENT = 64
"""Bytes to which torch aligns memory on the CPU; parts are cut at multiples of it."""


WEIGHTLESS = -1
"""The part of a parameter of which nothing but the layout was taken."""


@dataclass(frozen=True)
class TensorLayout:
    """A tensor's place in one of the parts; offset and strides in elements, the start of the part in bytes."""

    part: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    is_parameter: bool


@dataclass(frozen=True)
class Part:
    """A run of bytes on a device of this type."""

    bytes: int
    device_type: str


@dataclass(frozen=True)
class Packed:
    """A nested value without its tensors.

    Attributes:
        body: the pickled value, with a number in place of each tensor.
        layouts: of the tensors.
        parts: what the tensors lie in.
    """

    body: bytes
    layouts: tuple[TensorLayout, ...]
    parts: tuple[Part, ...]


def pack(value: Any, *, weights: bool = True) -> tuple[Packed, list[torch.Tensor]]:
    """A nested value as a header and flat tensors of bytes that share the value's memory.

    Args:
        value: whatever can be pickled.
        weights: false: of parameters only the layout is taken, and of other tensors a copy, since they may lie in the
            same memory as parameters.

    Raises:
        Exception: something in the value cannot be pickled.
    """
    tensors: list[torch.Tensor] = []
    file = io.BytesIO()
    _Pickler(file, tensors, weights).dump(value)
    groups: dict[int, list[int]] = {}
    layouts: dict[int, TensorLayout] = {}
    for index, tensor in enumerate(tensors):
        if weights or not isinstance(tensor, torch.nn.Parameter):
            groups.setdefault(storage_key(tensor), []).append(index)
        else:
            layouts[index] = TensorLayout(WEIGHTLESS, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0, True)
    parts, flats = [], []
    for part, members in enumerate(groups.values()):
        spans = [_span(tensors[index]) for index in members]
        start = min(first for first, _ in spans) // ALIGNMENT * ALIGNMENT
        size = max(last for _, last in spans) - start
        one = tensors[members[0]]
        parts.append(Part(size, one.device.type))
        flats.append(_bytes_of(one, start, size))
        for index, (first, _) in zip(members, spans, strict=True):
            own = tensors[index]
            layouts[index] = TensorLayout(
                part, own.dtype, tuple(own.shape), own.stride(), first - start, isinstance(own, torch.nn.Parameter)
            )
    return Packed(file.getvalue(), tuple(layouts[i] for i in range(len(tensors))), tuple(parts)), flats


def unpack(packed: Packed, tensor: Callable[[TensorLayout], torch.Tensor]) -> Any:
    """The nested value, with what `tensor` makes of each layout in its tensors' places."""
    tensors = [tensor(layout) for layout in packed.layouts]
    return _Unpickler(io.BytesIO(packed.body), tensors).load()


def tensor_in(flats: Sequence[torch.Tensor]) -> Callable[[TensorLayout], torch.Tensor]:
    """Makes tensors that lie in these bytes; for `unpack`."""

    def make(layout: TensorLayout) -> torch.Tensor:
        if layout.part == WEIGHTLESS:
            empty = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")
            return torch.nn.Parameter(empty, requires_grad=layout.dtype.is_floating_point)
        flat = flats[layout.part]
        start = layout.start // layout.dtype.itemsize
        own = torch.empty(0, dtype=layout.dtype, device=flat.device)
        own.set_(flat.untyped_storage(), start, layout.shape, layout.strides)
        return torch.nn.Parameter(own, requires_grad=False) if layout.is_parameter else own

    return make


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte that a tensor uses of its memory, and the one after the last."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


def _bytes_of(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), start, (size,), (1,))
    return flat


def _bound(function: Callable[..., Any], owner: Any) -> MethodType:
    return MethodType(function, owner)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], weights: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors = tensors
        self.weights = weights
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        is_parameter = isinstance(value, torch.nn.Parameter)
        known = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not known and not (is_parameter and not self.weights):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value if is_parameter else self._plain(value))
        return self._numbers[id(value)]

    def reducer_override(self, value: Any) -> Any:
        """A bound `functools.partial`, which torchao gives layers as a method, pickle would look up by a name."""
        if isinstance(value, MethodType) and not hasattr(value.__func__, "__name__"):
            return _bound, (value.__func__, value.__self__)
        return NotImplemented

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach().resolve_conj().resolve_neg()
        return plain if self.weights else plain.clone()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self.tensors[number]
