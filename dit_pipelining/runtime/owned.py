"""Modules whose calls go to the rank that owns their component, while they stay the same objects for those who use them."""

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dit_pipelining.errors import ConfigError
from dit_pipelining.runtime.components import OwnedComponent
from dit_pipelining.torch_internals import parse_to

OWNED = "_dit_pipelining_owned"

COMPUTES = re.compile(
    r"(^|_)(forward|encode|decode|generate|sample|denoise|quantize|features?|tokens|codes|indices|logits)(_|$)"
)
"""Names of public methods that compute; all others (switches, configuration) act on each rank's own module."""


def own(module: nn.Module, component: OwnedComponent) -> None:
    """Send calls of a module to the component's owner; its class, configuration and attributes stay what they are."""
    module.__dict__[OWNED] = component
    cls: Any = type(module)
    module.__class__ = _owned_class(cls)
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        for child in module.children():
            _own_reached(child, component)


def is_owned(module: Any) -> bool:
    """Whether calls of this module run on one rank."""
    return OWNED in getattr(module, "__dict__", {})


def owner_of(module: Any) -> int | None:
    """The rank that calls of this module run on; None: each rank runs its own."""
    component: OwnedComponent | None = getattr(module, "__dict__", {}).get(OWNED)
    return None if component is None else component.links.sender


def text_parts(components: Mapping[str, Any]) -> dict[str, int]:
    """Over how many ranks text encoders are split already, by a pipeline that they belong to; those that are."""
    found = {name: part.__dict__[OWNED].team for name, part in components.items() if is_owned(part)}
    return {name: len(team.talk.team.compute) for name, team in found.items() if team is not None and team.needs_all}


@contextmanager
def on_this_rank(modules: Iterable[Any]) -> Iterator[None]:
    """Run calls of these modules here and tell no other rank, for code that other ranks do not run.

    Raises:
        ConfigError: when one of them is called whose weights are on another rank.
    """
    components = {id(module): module.__dict__[OWNED] for module in modules if is_owned(module)}.values()
    before = [component.alone for component in components]
    for component in components:
        component.alone = True
    try:
        yield
    finally:
        for component, alone in zip(components, before, strict=True):
            component.alone = alone


def _own_reached(module: nn.Module, component: OwnedComponent) -> None:
    if not component.running and not is_owned(module):
        own(module, component)


@functools.cache
def _owned_class(cls: Any) -> Any:
    def device(self: nn.Module) -> torch.device:
        found: OwnedComponent = self.__dict__[OWNED]
        return found.device

    def getattribute(self: nn.Module, name: str) -> Any:
        value = cls.__getattr__(self, name)
        if isinstance(value, nn.Module):
            _own_reached(value, self.__dict__[OWNED])
        return value

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        target, dtype = parse_to(*args, **kwargs)
        _check_device(self, target)
        if dtype is not None:
            cls.to(self, dtype=dtype)
        return self

    def cpu(self: nn.Module) -> nn.Module:
        return to(self, "cpu")

    def cuda(self: nn.Module, device: Any = None) -> nn.Module:
        return to(self, "cuda" if device is None else torch.device("cuda", device) if type(device) is int else device)

    members: dict[str, Any] = {
        "device": property(device),
        "__getattr__": getattribute,
        "to": to,
        "cpu": cpu,
        "cuda": cuda,
        "__module__": cls.__module__,
        **{
            name: refusal(name, advice)
            for name, advice in REFUSED.items()
            if name.startswith("__") or hasattr(cls, name)
        },
    }
    members.update({name: _owned_method(cls, name) for name in dir(cls) if _computes(cls, name)})
    return type(cls.__name__, (cls,), members)


def _computes(cls: type, name: str) -> bool:
    if name.startswith("_") or (name != "forward" and hasattr(nn.Module, name)):
        return False
    return COMPUTES.search(name) is not None and inspect.isfunction(inspect.getattr_static(cls, name))


def _owned_method(cls: Any, name: str) -> Any:
    method = getattr(cls, name)

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        component: OwnedComponent = self.__dict__[OWNED]
        return component.call(name, method.__get__(self), args, kwargs)

    return call


def _check_device(module: nn.Module, target: torch.device | None) -> None:
    component: OwnedComponent = module.__dict__[OWNED]
    here = component.device
    if target is not None and target != here and not (target.type == here.type and target.index is None):
        raise ConfigError(
            f"the component {component.name!r} lives on rank {component.links.sender} and stays on its device; it cannot be "
            f"moved to {target}. ParallelConfig(component_ranks=...) chooses the rank."
        )


REFUSED = {
    "__deepcopy__": "A copy would need ranks of its own: load the pipeline again, or use the same component in both.",
    "__reduce_ex__": "Weights of a split pipeline lie on different ranks: copy the folder it was loaded from.",
    "save_pretrained": "Weights of a split pipeline lie on different ranks: copy the folder it was loaded from.",
    "enable_group_offload": "Ranks keep their part on their device: use more ranks instead.",
}
"""What no part of a split pipeline can do, and what to do instead."""


PYTHON = {"__deepcopy__": "copy.deepcopy", "__reduce_ex__": "pickling or copy.copy"}
"""What calls a method that nobody calls by its name."""


def refusal(name: str, advice: str) -> Any:
    """A method that raises a ConfigError."""

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"{PYTHON.get(name, name)} of a {type(self).__name__} that is spread over ranks is not possible. {advice}"
        )

    return refuse
