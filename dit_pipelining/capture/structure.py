"""Walk through the nested arguments and results of calls: lists, tuples, dicts and slices."""

from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nested value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A nested value with every tensor replaced by `function(tensor)`."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, torch.Size):
        return value
    if is_namedtuple(value):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: map_tensors(function, item) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_tensors(function, part) for part in (value.start, value.stop, value.step)))
    return value


def hands_through(arguments: Any, result: Any) -> bool:
    """Whether some of a call's tensors are in its result too."""
    given = {id(tensor) for tensor in tensors_in(arguments)}
    return any(id(tensor) in given for tensor in tensors_in(result))


def copies_of_given(arguments: Any, result: Any) -> Any:
    """The result of a call with copies in the place of those of the call's own tensors that are in it."""
    given = {id(tensor) for tensor in tensors_in(arguments)}
    return map_tensors(lambda tensor: tensor.clone() if id(tensor) in given else tensor, result)


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")
