"""The vocabulary of recorded glue: the functions and marks that FX nodes use beside torch's own."""

import operator
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

Operation = tuple[str, Any]
"""Kind and target of an FX node: ("call_method", "view"), ("call_function", torch.cat), ..."""

getitem = operator.getitem


def as_node_call(func: Any, args: tuple[Any, ...]) -> tuple[Operation, tuple[Any, ...]]:
    """The FX operation that makes the same call as torch's API function `func` does on `args`."""
    name = getattr(func, "__name__", "")
    owner: Any = getattr(func, "__self__", None)
    if name == "__get__":
        return ("call_function", getattr), (args[0], owner.__name__)
    if name == "__set__":
        return ("call_function", setattr), (args[0], owner.__name__, args[1])
    if name == "__setitem__":
        return ("call_function", operator.setitem), args
    if name == "__getitem__":
        return ("call_function", operator.getitem), args
    if func in _METHODS:
        return ("call_method", _METHODS[func]), args
    return ("call_function", func), args


def _tensor_methods() -> dict[Any, str]:
    """Names of torch.Tensor's methods. A function's own `__name__` can differ: `__rpow__` is called `pow`."""
    members = {name: getattr(torch.Tensor, name, None) for name in dir(torch.Tensor)}
    return {member: name for name, member in members.items() if callable(member) and isinstance(member, Hashable)}


_METHODS = _tensor_methods()


def written(tensor: torch.Tensor, write: Any) -> torch.Tensor:
    """`tensor`, after the node `write` has written into its memory."""
    return tensor


def call(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def method(name: str) -> Callable[..., Any]:
    def call_method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, name)(*args, **kwargs)

    return call_method


def under_autocast(
    function: Callable[..., Any], states: tuple[tuple[str, bool, torch.dtype], ...]
) -> Callable[..., Any]:
    """`function` run in the autocast state that the forward had set where it was recorded."""

    def autocast_call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for device_type, enabled, dtype in states:
                if device_type == "cpu" or torch.cuda.is_available():
                    stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled))
            return function(*args, **kwargs)

    return autocast_call


@dataclass(frozen=True)
class Rebuilt:
    """A typed container in a forward's output: a diffusers output class or a namedtuple, and its fields."""

    cls: type
    fields: dict[str, Any]


@dataclass(frozen=True)
class Typed:
    """A dict of a class of its own in a forward's output, such as an OrderedDict."""

    cls: type
    items: dict[Any, Any]


@dataclass(frozen=True, eq=False)
class Template:
    """An object made by glue, and the parts in it (tensors, other objects) that each run replaces."""

    value: Any
    parts: list[Any]

    @classmethod
    def of(cls, value: Any, parts: list[Any]) -> "Template":
        """A copy of `value` as it is now; `parts` are not copied."""
        return cls(deepcopy(value, {id(part): part for part in parts}), parts)


Made = dict[int, Any]
"""Objects that glue has made during one call, by the id of their template."""


def instantiate(template: Template, parts: list[Any], made: Made) -> Any:
    """A new object like the template's, with `parts` in the place of the recorded ones.

    It is made once per call: all stages that run in one process share it, as the blocks of the unsplit model do.
    """
    if id(template) not in made:
        made[id(template)] = deepcopy(
            template.value, {id(old): new for old, new in zip(template.parts, parts, strict=True)}
        )
    return made[id(template)]


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory, where only a shape matters."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)
