"""How the values of a message lie in its buffer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

ALIGNMENT = 64
HOST, STAGED, DEVICE, PLAIN = "host", "staged", "device", "plain"
"""How a value travels: in host memory; copied from and to an accelerator through it; from device to device; as text."""


@dataclass(frozen=True)
class Place:
    """One value of a message.

    Attributes:
        name: its key.
        route: HOST, STAGED, DEVICE or PLAIN.
        dtype, shape, strides: of a tensor.
        text: of anything else, as JSON: 1, 1.0 and True are not the same.
    """

    name: str
    route: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    text: str = ""

    @property
    def num_bytes(self) -> int:
        if self.dtype is None:
            return 0
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with this place's strides; a copy where it has gaps, overlaps or other strides."""
        tensor = tensor.detach()
        return tensor if tensor.stride() == self.strides else self.empty(tensor.device).copy_(tensor)

    def as_list(self) -> list[Any]:
        return [self.name, self.route, self.dtype and str(self.dtype), self.shape, self.strides, self.text]

    @staticmethod
    def from_list(values: list[Any]) -> "Place":
        name, route, dtype, shape, strides, text = values
        dtype = getattr(torch, dtype.removeprefix("torch.")) if dtype else None
        return Place(name, route, dtype, tuple(shape), tuple(strides), text)


@dataclass(frozen=True)
class Layout:
    """The places of a message's values, in order. Without any it is the layout of a message that holds nothing."""

    places: tuple[Place, ...] = ()

    @cached_property
    def offsets(self) -> list[int]:
        """Where each value starts in the buffer."""
        offsets, end = [], 0
        for place in self.places:
            offsets.append(end)
            if place.route in (HOST, STAGED):
                end += -(-place.num_bytes // ALIGNMENT) * ALIGNMENT
        return [*offsets, end]

    @property
    def host_bytes(self) -> int:
        return self.offsets[-1]

    @cached_property
    def staged(self) -> bool:
        return any(place.route == STAGED for place in self.places)

    @cached_property
    def device_places(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.route == DEVICE)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.places)

    def pack(self, tensors: Mapping[str, Any], buffer: torch.Tensor) -> None:
        """Copy the values into the buffer; when it returns, they may change."""
        for place, view in self._views(buffer):
            view.copy_(tensors[place.name].detach(), non_blocking=place.route == STAGED)
        if self.staged:
            torch.accelerator.current_stream().synchronize()

    def unpack(self, buffer: torch.Tensor, device: torch.device) -> dict[str, Any]:
        """The values in the buffer: views of it, or copies on the device of those that came from one."""
        values: dict[str, Any] = {place.name: json.loads(place.text) for place in self.places if place.route == PLAIN}
        with torch.inference_mode(False):
            for place, view in self._views(buffer):
                values[place.name] = view.to(device, non_blocking=True) if place.route == STAGED else view
        return values

    def _views(self, buffer: torch.Tensor) -> list[tuple[Place, torch.Tensor]]:
        views = []
        for place, start in zip(self.places, self.offsets, strict=False):
            if place.route in (HOST, STAGED):
                assert place.dtype is not None
                flat = buffer[start : start + place.num_bytes].view(place.dtype)
                views.append((place, flat.as_strided(place.shape, place.strides)))
        return views


def layout_of(values: Mapping[str, Any], device_to_device: bool) -> Layout:
    """The layout of a message with these values.

    Args:
        values: by name.
        device_to_device: whether tensors on an accelerator go to the other rank's directly.

    Raises:
        TypeError: a value cannot be sent.
    """
    return Layout(tuple(_place_of(name, value, device_to_device) for name, value in values.items()))


def _place_of(name: str, value: Any, device_to_device: bool) -> Place:
    if isinstance(value, torch.Tensor):
        route = HOST if value.device.type == "cpu" else DEVICE if device_to_device else STAGED
        return Place(name, route, value.dtype, tuple(value.shape), _dense_strides(value))
    if value is None or isinstance(value, bool | int | float | str):
        return Place(name, PLAIN, text=json.dumps(value))
    raise TypeError(
        f"{name!r} is a {type(value).__name__}; a stage can send tensors, None, bools, numbers and texts. Put tensors of a "
        "tuple or list under names of their own."
    )


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides where it has no gaps, so that it lies on the other rank as it lies here, else ones without."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
