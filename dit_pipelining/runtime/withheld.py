"""Stand-ins for decoded data on ranks that return none of it.

[Note: ranks without output]
A pipeline's code after `vae.decode` runs on every rank, and it may call more components (LTX2 decodes sound after the
pictures), so a rank that returns nothing cannot leave early. Instead it gets `Withheld` tensors: they have a shape, a dtype
and a device, but no memory. Operations on them give withheld tensors again, the pipeline's image and video processors hand
them through, and `numpy()` gives zeros that all lie in one element. At the end the attached pipeline replaces what it
returns by None. Where such a tensor would be an input of a model, an error says that this pipeline needs its pixels.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dit_pipelining.comm.packing import TensorLayout
from dit_pipelining.errors import ConfigError
from dit_pipelining.torch_internals import no_torch_function, parse_to, tree_flatten, tree_map

HANDED_THROUGH = ("postprocess", "apply_overlay", "numpy_to_pil", "pt_to_numpy")
"""Methods of image and video processors, by the beginning of their names, that take decoded data."""


class Withheld(torch.Tensor):
    """A tensor on the meta device that answers as if it were on `device`. See [Note: ranks without output]."""

    _device: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        found = _first(args, kwargs)
        if found is None:
            with no_torch_function():
                return func(*args, **kwargs)
        answer = _WITHOUT_DATA.get(getattr(func, "__name__", ""))
        if answer is not None:
            return answer(found, *args[1:], **kwargs)
        if func == torch.Tensor.device.__get__:
            return found._device
        if "device" in kwargs:
            kwargs["device"] = "meta"
        with no_torch_function():
            result = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        return tree_map(lambda leaf: _withhold(leaf, found._device), result)


def withheld(layout: TensorLayout, device: torch.device) -> torch.Tensor:
    """A withheld tensor of this layout."""
    meta = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")
    return _withhold(meta, device)


def refuse_withheld(name: str, *values: Any) -> None:
    """Refuse to run a model on data that this rank does not have.

    Raises:
        ConfigError: one of the values holds a withheld tensor.
    """
    if _first(*values) is not None:
        raise ConfigError(
            f'{name} is called with what the pipeline has decoded, which this rank does not get. Use output_ranks="all" '
            "with this pipeline."
        )


def hand_through(processors: Any) -> None:
    """Let the image and video processors among a pipeline's attributes return withheld data as it is."""
    for processor in processors:
        for name in dir(type(processor)):
            if name.startswith(HANDED_THROUGH) and callable(getattr(processor, name)):
                setattr(processor, name, _handing_through(getattr(processor, name)))


def without_data(output: Any) -> Any:
    """A pipeline's output, of the same class, with None in place of all data."""
    if isinstance(output, tuple):
        return tuple(None for _ in output)
    if hasattr(output, "keys"):
        return type(output)(**dict.fromkeys(output.keys()))
    return None


def _handing_through(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = _first(args, kwargs)
        return method(*args, **kwargs) if found is None else found

    return call


def _first(*values: Any) -> Withheld | None:
    leaves, _ = tree_flatten(values)
    return next((leaf for leaf in leaves if isinstance(leaf, Withheld)), None)


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, Withheld):
        return leaf
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf


def _withhold(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    own = leaf.as_subclass(Withheld)
    own._device = device
    return own


def _to(tensor: Withheld, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and isinstance(args[0], torch.Tensor):
        device, dtype = args[0].device, args[0].dtype
    else:
        kwargs.pop("copy", None)
        found, wanted = parse_to(*args, **kwargs)
        device, dtype = found or tensor._device, wanted or tensor.dtype
    with no_torch_function():
        meta = torch.empty_like(tensor, dtype=dtype, device="meta")
    own: torch.Tensor = _withhold(meta, device)
    return own


def _zeros(tensor: Withheld, *_: Any, **__: Any) -> Any:
    with no_torch_function():
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        return np.broadcast_to(np.zeros((), dtype), tuple(tensor.shape))


_WITHOUT_DATA: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cpu": lambda tensor, *_, **__: _to(tensor, "cpu"),
    "cuda": lambda tensor, *_, **__: _to(tensor, "cuda"),
    "numpy": _zeros,
    "__array__": _zeros,
    "tolist": lambda tensor: _zeros(tensor).tolist(),
    "item": lambda tensor: _zeros(tensor).item(),
    "__bool__": lambda tensor: False,
    "__float__": lambda tensor: 0.0,
    "__int__": lambda tensor: 0,
    "__repr__": lambda tensor, *_, **__: f"Withheld({tuple(tensor.shape)})",
}
"""Uses that look at data, and moves, by the name of the method."""
