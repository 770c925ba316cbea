"""The leaves of an operation's arguments. Torch's own flattening, in Python, is most of the cost of deferring one."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dit_pipelining.torch_internals import tree_flatten, tree_unflatten

PLAIN = {torch.device, torch.dtype, torch.layout, torch.memory_format, bool, complex, float, int, str, type(None)}
"""Types of arguments, beside tensors, that hold no others."""


class _Plain(NamedTuple):
    """The structure of arguments among which there is no container."""

    positional: int
    names: tuple[str, ...]


def flatten_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of positional and keyword arguments, and their structure, which is hashable."""
    leaves = [*args, *kwargs.values()]
    if all(type(leaf) in PLAIN or isinstance(leaf, torch.Tensor) for leaf in leaves):
        return leaves, _Plain(len(args), tuple(kwargs))
    return tree_flatten((tuple(args), dict(kwargs)))


def unflatten_arguments(leaves: list[Any], structure: Any) -> tuple[Any, dict[str, Any]]:
    """Positional and keyword arguments of the structure with other leaves."""
    if isinstance(structure, _Plain):
        return leaves[: structure.positional], dict(zip(structure.names, leaves[structure.positional :], strict=True))
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs
