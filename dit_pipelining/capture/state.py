"""Plain Python values on a model that its glue reads: flags and lengths that a pipeline sets between two calls."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from torch import nn

from dit_pipelining.capture.signature import CONSTANTS


class GlueState:
    """The plain values on the modules whose code is recorded.

    Blocks run their own code at every call, so what is in them is no part of this; nor is what torch's modules hold.

    Args:
        model: the unsplit transformer.
        blocks: names of its blocks.
    """

    def __init__(self, model: nn.Module, blocks: Iterator[str] | list[str]) -> None:
        inside = tuple(f"{name}." for name in blocks)
        self._modules = [
            module
            for name, module in model.named_modules()
            if not f"{name}.".startswith(inside) and not type(module).__module__.startswith("torch.")
        ]

    def now(self) -> Hashable:
        """Equal for two calls only if these values, and diffusers' configuration, are."""
        return tuple(
            (index, name, value) for index, module in enumerate(self._modules) for name, value in _plain(vars(module))
        )


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Hashable]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and name == "_internal_dict":  # what `register_to_config` changes
            yield name, repr(sorted(value.items(), key=repr))
        elif isinstance(value, CONSTANTS) and not name.startswith("_"):
            yield name, (type(value), repr(value))
