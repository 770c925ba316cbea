"""Results of a function of a call's inputs, kept while the very same inputs come again."""

import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dit_pipelining.capture.code import Function
from dit_pipelining.torch_internals import version

ADAPTER_ATTRIBUTES = ("scaling", "_active_adapter", "merged_adapters", "_disable_adapters")
"""What peft's layers compute with, beside their parameters."""


@dataclass(eq=False)
class KeptFunction:
    """A function of some of a call's tensors and of weights, computed again only when one of them has changed.

    A denoising loop passes the same prompt embeddings, masks and position ids at every step. A result is kept under the
    identity of the input tensors, the versions of inputs and weights, and the state of LoRA layers, and goes when one of
    the inputs dies. Tensors whose writes torch does not count (made in inference mode), and calls that record gradients,
    are never kept.

    Attributes:
        inputs: paths of the inputs; none for results made of shapes and buffers alone.
        weights: names of the modules, parameters and buffers the function uses, looked up on the root it runs on.
    """

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    function: Function
    _kept: dict[tuple[int, ...], tuple[Hashable, tuple[Any, ...]]] = field(default_factory=dict)

    def get(self, root: nn.Module, leaves: Mapping[str, Any]) -> tuple[Any, ...]:
        inputs = [leaves[path] for path in self.inputs]
        weights = [tensor for name in self.weights for tensor in _tensors_at(root, name)]
        versions = tuple(version(tensor) for tensor in (*inputs, *weights))
        if torch.is_grad_enabled() or -1 in versions:
            return self.function(root, *inputs)
        key = tuple(id(tensor) for tensor in inputs)
        state = (versions, tuple(id(tensor) for tensor in weights), _adapter_state(root, self.weights))
        known = self._kept.get(key)
        if known is None or known[0] != state:
            if known is None:
                for tensor in inputs:
                    weakref.finalize(tensor, _forget, weakref.ref(self), key)
            known = self._kept[key] = (state, self.function(root, *inputs))
        return known[1]


def _forget(owner: "weakref.ref[KeptFunction]", key: tuple[int, ...]) -> None:
    function = owner()
    if function is not None:
        function._kept.pop(key, None)


def _adapter_state(root: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Scales and switches of the LoRA layers below these names: they change a result without a write into a tensor."""
    layers = [vars(part) for name in names for part in _parts_at(root, name) if "scaling" in vars(part)]
    return tuple(repr(attributes.get(name)) for attributes in layers for name in ADAPTER_ATTRIBUTES)


def _parts_at(root: nn.Module, name: str) -> Iterable[nn.Module]:
    value = _value_at(root, name)
    return value.modules() if isinstance(value, nn.Module) else ()


def _tensors_at(root: nn.Module, name: str) -> Iterable[torch.Tensor]:
    """The tensor of this name, or the parameters of the module of this name."""
    value = _value_at(root, name)
    return value.parameters() if isinstance(value, nn.Module) else (value,)


def _value_at(root: nn.Module, name: str) -> Any:
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part)
    return value
