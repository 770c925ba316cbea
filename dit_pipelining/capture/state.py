"""What a model's glue depends on beside inputs and weights, and what can change between two calls."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from dit_pipelining.capture.module_hooks import glue_modules, has_hooks
from dit_pipelining.capture.opaque import CONTAINERS, is_opaque
from dit_pipelining.capture.signature import CONSTANTS


class GlueState:
    """The modules whose code is recorded: their classes, their plain values, which have hooks or a forward of their own.

    Blocks run their own code at every call, so what is in them is no part of this; of modules that are called as a whole only
    hooks and forwards are, since what they gave may be kept.

    Args:
        model: the unsplit transformer.
        blocks: names of its blocks.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        self._model = model
        self._blocks = frozenset(blocks)

    def now(self) -> Hashable:
        """Equal for two calls only if the same forward is to be recorded."""
        return tuple(self._parts())

    def changed_by_hand(self) -> list[str]:
        """What the caller has put on modules of the glue, in words: ranks record the same only if it is the same on all."""
        found = []
        for name, module in glue_modules(self._model, self._blocks):
            if name and has_hooks(module):
                found.append(f"a hook on {name}")
            if name and (forward := vars(module).get("forward")) is not None:
                found.append(f"a forward of {name}: {getattr(forward, '__qualname__', type(forward).__name__)}")
        return sorted(found)

    def _parts(self) -> Iterator[Hashable]:
        for name, module in glue_modules(self._model, self._blocks):
            if name and has_hooks(module):
                yield name, "hook"
            if name and "forward" in vars(module):
                yield name, "forward", vars(module)["forward"]
            if isinstance(module, CONTAINERS):
                yield name, len(module)
            elif not is_opaque(module):
                yield name, type(module)
                if not type(module).__module__.startswith("torch."):
                    yield from ((name, *value) for value in _plain(vars(module)))


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Hashable]]:
    for name, value in values.items():
        if name == "_internal_dict" and isinstance(value, Mapping):  # what `register_to_config` changes
            yield name, repr(sorted(value.items(), key=repr))
        elif not name.startswith("_") and isinstance(value, CONSTANTS):
            yield name, (type(value), repr(value))
