"""Which tensors of a model without weights the caller has given it since it was built.

A model waits for its checkpoint until its first call. What the caller puts in meanwhile (adapters, an IP-Adapter, a layer of
their own) has weights already and is kept; what the caller wrote into tensors without data is lost, and said.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from dit_pipelining.errors import ConfigError
from dit_pipelining.torch_internals import version
from dit_pipelining.weights.load import name_without_adapter


@dataclass(frozen=True, eq=False)
class _Untouched:
    """A tensor without data as it was when the model was built, and its names there."""

    tensor: "weakref.ref[torch.Tensor]"
    version: int
    names: set[str]


class Untouched:
    """A model's tensors as they were when it was built.

    Args:
        model: built by `empty_model`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[int, _Untouched] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            known = self._tensors.setdefault(id(tensor), _Untouched(weakref.ref(tensor), version(tensor), set()))
            known.names.add(name)

    def given(self, model: nn.Module) -> frozenset[str]:
        """Names of the tensors that are not the model's first ones; they have data.

        Raises:
            ConfigError: something was written into a tensor that has no data yet, or made from such ones; or one was moved
                or taken out.
        """
        found = set()
        tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        names = {name_without_adapter(name) for name in tensors}
        if gone := sorted(name for first in self._tensors.values() for name in first.names - names):
            is_compiled = any("._orig_mod." in name for name in names)
            raise ConfigError(_lost(model, gone[0], "was wrapped by torch.compile" if is_compiled else "was taken out"))
        for name, tensor in tensors.items():
            first = self._tensors.get(id(tensor))
            if first is not None and first.tensor() is tensor:
                if version(tensor) != first.version:
                    raise ConfigError(_lost(model, name, "was written into"))
                if name_without_adapter(name) not in first.names:
                    raise ConfigError(_lost(model, min(first.names), f"was put in the place of {name!r}"))
            elif tensor.device.type == "meta":
                raise ConfigError(_lost(model, name, "was made"))
            else:
                found.add(name)
        return frozenset(found)


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Give parameters without data the CPU as their device meanwhile, by zeros that take no memory.

    peft puts an adapter where its layer's weights are: beside weights that are not there yet it would lose its own.
    """
    exchanged = []
    for module in list(model.modules()):
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                exchanged.append((module, key, parameter))
                blank = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[key] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for module, key, parameter in exchanged:
            module._parameters[key] = parameter


def _lost(model: nn.Module, name: str, what: str) -> str:
    return (
        f"{type(model).__name__}'s {name!r} {what} before the pipeline's first call, when the checkpoint had not been read, "
        "so the change would be lost. Change weights after the first call, or load the transformer yourself and pass it as "
        "`transformer=`."
    )
