"""Results of a function of a call's inputs, kept while the very same inputs come again."""

import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dit_pipelining.capture.code import Function
from dit_pipelining.capture.structure import map_tensors, tensors_in
from dit_pipelining.torch_internals import version, without_base

ADAPTER_ATTRIBUTES = ("scaling", "_active_adapter", "merged_adapters", "_disable_adapters")
"""What peft's layers compute with, beside their parameters."""


@dataclass(eq=False)
class KeptFunction:
    """A function of some of a call's tensors and of weights, computed again only when one of them has changed.

    A denoising loop passes the same prompt embeddings, masks and position ids at every step. A result is kept under the
    identity of the input tensors, the versions of inputs and weights, and the state of LoRA and attention layers, and goes
    when one of the inputs dies. Tensors whose writes torch does not count (made in inference mode), and calls that record
    gradients, are never kept.

    Attributes:
        inputs: paths of the inputs; none for results made of shapes and buffers alone.
        weights: names of the modules, parameters and buffers the function uses, looked up on the root it runs on.
    """

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    function: Function
    _kept: dict[tuple[int, ...], "_Entry"] = field(default_factory=dict)

    def get(self, root: nn.Module, leaves: Mapping[str, Any]) -> tuple[Any, ...]:
        inputs = [leaves[path] for path in self.inputs]
        weights = [tensor for name in self.weights for tensor in _tensors_at(root, name)]
        versions = tuple(version(tensor) for tensor in (*inputs, *weights))
        if torch.is_grad_enabled() or -1 in versions:
            return self.function(root, *inputs)
        key = tuple(id(tensor) for tensor in inputs)
        # What `parameter.data = ...` changes alone; casts may come by the memory that they have just given back.
        places = tuple((tensor.data_ptr(), tensor.dtype) for tensor in weights)
        state = (versions, places, module_state(part for name in self.weights for part in parts_at(root, name)))
        known = self._kept.get(key)
        if known is None or known.state != state or known.is_written_into or not known.is_of(inputs, weights):
            known = self._kept[key] = self._entry(key, state, inputs, weights, self.function(root, *inputs))
        return known.results

    def _entry(
        self, key: tuple[int, ...], state: Hashable, inputs: list[Any], weights: list[Any], results: tuple[Any, ...]
    ) -> "_Entry":
        # [Note: kept results] Request threads and a stage's worker thread come here at once. There is no lock, since the
        # callback runs wherever an input dies, perhaps in the thread that holds the lock: each access to the dict is one
        # step, and what two threads can do to each other is to compute a result twice or to forget one.
        owner = weakref.ref(self)

        # Else a view of an input would keep it alive, and with it this entry.
        results = map_tensors(without_base, results)

        def forget(reference: "weakref.ref[Any]") -> None:
            function = owner()
            known = function._kept.get(key) if function is not None else None
            if function is not None and known is not None and any(reference is own for own in known.inputs):
                function._kept.pop(key, None)

        return _Entry(
            tuple(weakref.ref(tensor, forget) for tensor in inputs),
            tuple(weakref.ref(tensor) for tensor in weights),
            state,
            results,
            _versions(results),
        )


@dataclass(frozen=True, eq=False)
class _Entry:
    """One kept result. Its references end with it, so a long-lived input that many calls share gathers none."""

    inputs: tuple["weakref.ref[Any]", ...]
    weights: tuple["weakref.ref[Any]", ...]
    state: Hashable
    results: tuple[Any, ...]
    versions: tuple[int, ...]

    @property
    def is_written_into(self) -> bool:
        """Whether somebody who was given the results, a hook of a block, has written into them."""
        return _versions(self.results) != self.versions

    def is_of(self, inputs: list[Any], weights: list[Any]) -> bool:
        """Whether it was computed from these very tensors: an id alone may be another's by now."""
        tensors, references = [*inputs, *weights], [*self.inputs, *self.weights]
        return len(tensors) == len(references) and all(
            reference() is tensor for reference, tensor in zip(references, tensors, strict=True)
        )


def _versions(results: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(map(version, tensors_in(results)))


def module_state(parts: Iterable[nn.Module]) -> tuple[str, ...]:
    """What changes the results of these modules without a write into a tensor.

    That is scales and switches of LoRA layers, and the attention backend: a layer's own, or the one of diffusers' context.
    """
    state = []
    for part in parts:
        attributes = vars(part)
        if "scaling" in attributes:
            state += [repr(attributes.get(name)) for name in ADAPTER_ATTRIBUTES]
        if (processor := attention_processor(part)) is not None:
            state.append(f"{processor._attention_backend} {active_backend()}")
    return tuple(state)


def has_state(part: nn.Module) -> bool:
    """Whether `module_state` has something to say about the module."""
    return "scaling" in vars(part) or attention_processor(part) is not None


def attention_processor(part: nn.Module) -> Any:
    """A diffusers attention layer's processor, which names its backend; None for other modules."""
    processor = vars(part).get("processor") or part._modules.get("processor")
    return processor if hasattr(processor, "_attention_backend") else None


def active_backend() -> str:
    """The attention backend of layers that name none."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return str(_AttentionBackendRegistry.get_active_backend()[0])


def parts_at(root: nn.Module, name: str) -> Iterable[nn.Module]:
    value = _value_at(root, name)
    return value.modules() if isinstance(value, nn.Module) else ()


def _tensors_at(root: nn.Module, name: str) -> Iterable[torch.Tensor]:
    """The tensor of this name, or the parameters and buffers of the module of this name."""
    value = _value_at(root, name)
    return (*value.parameters(), *value.buffers()) if isinstance(value, nn.Module) else (value,)


def _value_at(root: nn.Module, name: str) -> Any:
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part)
    return value
