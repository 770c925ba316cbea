"""A case: one tiny configuration of a diffusers DiT class, with the inputs its pipeline would pass.

Tensors are described, not held: `randn`, `full`, `values` and `built` return a `Described`, and `build_inputs` makes
the tensors, always the same ones for the same seed.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import diffusers.models.transformers as diffusers_transformers
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import nn

NOISE_SCALE = 0.1
"""Standard deviation of what is added to parameters that the class leaves constant."""


@dataclass(frozen=True)
class Described:
    """An input that is made anew by each `build_inputs` call."""

    text: str
    make: Callable[[torch.Generator], Any] = field(repr=False, compare=False)


def randn(*shape: int, scale: float = 1.0) -> Described:
    """A float32 tensor of this shape with normal values of this standard deviation."""
    return Described(f"randn{shape}", lambda generator: torch.randn(shape, generator=generator) * scale)


def full(shape: tuple[int, ...], value: float, dtype: torch.dtype = torch.float32) -> Described:
    """A tensor of this shape with one value everywhere."""
    return Described(f"full({shape}, {value}, {dtype})", lambda _: torch.full(shape, value, dtype=dtype))


def values(data: Any, dtype: torch.dtype) -> Described:
    """A tensor of these (nested) values."""
    return Described(f"values({dtype})", lambda _: torch.tensor(data, dtype=dtype))


def integers(high: int, *shape: int) -> Described:
    """An int64 tensor of this shape with values in [0, high)."""
    return Described(f"integers{shape}", lambda generator: torch.randint(high, shape, generator=generator))


def keep_first(kept: list[int], length: int, dtype: torch.dtype = torch.bool) -> Described:
    """A mask of shape (len(kept), length): in row i the first kept[i] positions are true, the rest is padding."""
    rows = [[position < count for position in range(length)] for count in kept]
    return values(rows, dtype)


def grid_ids(*sizes: int, dtype: torch.dtype = torch.int64, batch: int | None = None) -> Described:
    """Coordinates of a grid, last axis fastest: shape (tokens, len(sizes)), with a batch axis in front if asked."""

    def make(_: torch.Generator) -> torch.Tensor:
        ids = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).reshape(-1, len(sizes)).to(dtype)
        return ids if batch is None else ids.expand(batch, -1, -1).contiguous()

    return Described(f"grid_ids{sizes}", make)


def built(make: Callable[[torch.Generator], Any]) -> Described:
    """Any object, made by a function of the generator: a cache, a mask object, a tensor of no simpler description."""
    return Described(f"built({getattr(make, '__name__', 'function')})", make)


def without(table: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A copy of the table that lacks these names."""
    return {name: value for name, value in table.items() if name not in names}


@dataclass(frozen=True)
class Case:
    """A model class of diffusers, named, with keyword arguments of its `__init__` and of its `forward`.

    Args:
        name: unique label; variants of a class are named `Class@variant`.
        model_class: name of the class under `diffusers.models.transformers`.
        init: keyword arguments of the class.
        inputs: keyword arguments of `forward` without `return_dict`; `Described` values may be nested in lists, tuples
            and dictionaries.
        carries_state: the call reads or writes an object, such as a KV cache, that outlives it.
        attention_backend: name of a diffusers attention backend, for a call that the default backend does not serve.
        idle: names of the block lists, or of single blocks, that this call leaves alone.
    """

    name: str
    model_class: str
    init: Mapping[str, Any]
    inputs: Mapping[str, Any]
    carries_state: bool = False
    attention_backend: str | None = None
    idle: frozenset[str] = frozenset()

    def load_class(self) -> type[nn.Module]:
        """The class itself. Raises `LookupError` if this diffusers has no class of that name."""
        exported = getattr(diffusers_transformers, self.model_class, None)
        if isinstance(exported, type) and issubclass(exported, nn.Module):
            return exported
        classes = dit_classes()
        if self.model_class not in classes:
            raise LookupError(f"this diffusers has no class {self.model_class!r} under diffusers.models.transformers")
        return classes[self.model_class]


@cache
def dit_classes() -> dict[str, type[nn.Module]]:
    """Every model class that a module of `diffusers.models.transformers` defines, by name."""
    found: dict[str, type[nn.Module]] = {}
    for info in pkgutil.walk_packages(diffusers_transformers.__path__, diffusers_transformers.__name__ + "."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            defined_here = inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == info.name
            if defined_here and getattr(value, "config_name", None):
                found[name] = value
    return found


def build_model(case: Case, seed: int = 0) -> nn.Module:
    """The case's model on the CPU in float32 and eval mode, without gradients, the same for the same seed.

    Parameters that the class leaves constant (zero gates and output projections, norm weights of one) get normal noise
    added, and parameters that it leaves uninitialised get normal values: otherwise blocks would be identities or alike,
    and a wrong split would look right.
    """
    patch_torchvision_resize()
    patch_mask_compilation()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with with_noise() as models:
            model = case.load_class()(**deepcopy(dict(case.init)))
            models.append(model)
    if case.attention_backend is not None:
        _set_attention_backend(model, case.attention_backend)
    return model.eval().requires_grad_(False)


@contextmanager
def with_noise() -> Iterator[list[nn.Module]]:
    """Yields a list; the models that are in it at the end get noise where their class leaves parameters constant."""
    models: list[nn.Module] = []
    with _uninitialised_memory_is_nan():
        yield models
        with torch.no_grad():
            for parameter in (parameter for model in models for parameter in model.parameters()):
                if parameter.isnan().any():
                    parameter.normal_(std=NOISE_SCALE)
                elif parameter.numel() and parameter.min() == parameter.max():
                    parameter.add_(torch.randn(parameter.shape), alpha=NOISE_SCALE)


def build_inputs(case: Case, seed: int = 0, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Keyword arguments of `forward`, with `return_dict=False` where it has that; the same for the same seed.

    Every call makes new tensors and new objects, so a cache that one forward fills is empty again for the next.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: _make(value, generator, torch.device(device)) for name, value in case.inputs.items()}
    if "return_dict" in inspect.signature(case.load_class().forward).parameters:
        inputs["return_dict"] = False
    return inputs


def patch_torchvision_resize() -> None:
    """Give the Cosmos model the one function it calls of torchvision, where torchvision is not installed.

    For tensors, torchvision's `resize` with nearest interpolation is `torch.nn.functional.interpolate`.
    """
    from diffusers.models.transformers import transformer_cosmos

    if hasattr(transformer_cosmos, "transforms"):
        return

    def resize(image: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
        return nn.functional.interpolate(image, size=size, mode=interpolation)

    transformer_cosmos.transforms = SimpleNamespace(
        functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )


def patch_mask_compilation() -> None:
    """Let Wan-Animate-2 build its block mask without compiling the mask function.

    The mask is the same; compiling it for a CPU takes 20 seconds and a C++ compiler.
    """
    from diffusers.models.transformers import transformer_wan_animate_2

    create = transformer_wan_animate_2.create_block_mask
    if not isinstance(create, partial):
        transformer_wan_animate_2.create_block_mask = partial(_create_mask_eagerly, create)


def _create_mask_eagerly(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return create(*args, **(kwargs | dict(_compile=False)))


def _set_attention_backend(model: nn.Module, backend: str) -> None:
    """For this model only: its own `set_attention_backend` also changes the default of every other model."""
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if processor is not None and hasattr(processor, "_attention_backend"):
            processor._attention_backend = AttentionBackendName(backend)


def _make(value: Any, generator: torch.Generator, device: torch.device) -> Any:
    if isinstance(value, Described):
        return _move(value.make(generator), device)
    if isinstance(value, Mapping):
        return {key: _make(item, generator, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_make(item, generator, device) for item in value)
    return value


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_move(item, device) for item in value)
    if isinstance(value, Mapping):
        return {key: _move(item, device) for key, item in value.items()}
    if hasattr(value, "to"):
        return value.to(device)
    for name, attribute in vars(value).items() if hasattr(value, "__dict__") else ():
        setattr(value, name, _move(attribute, device))
    return value


@contextmanager
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """In deterministic mode, torch fills the result of `torch.empty` with NaN, so that it can be told from a value."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
