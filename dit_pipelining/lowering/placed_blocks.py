"""Blocks stay on the stages that have their weights, whatever a caller does with the lists that they are in."""

import weakref
from collections.abc import Callable, Sequence

from torch import nn

from dit_pipelining.errors import ConfigError


class PlacedBlocks:
    """Where the blocks of a model are since it was split.

    Args:
        model: whose stages are on several ranks.
        blocks: names of its blocks.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._model = model
        self._places: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        for name in blocks:
            block = model.get_submodule(name)
            self._places[id(block)] = weakref.ref(block), name

    def check(self, blocks: Sequence[str], stage_of: Callable[[str], int | None]) -> None:
        """Check that no block has come to a place whose stage lacks its weights.

        Args:
            blocks: names of the model's blocks now.
            stage_of: the stage that has a block, by its name.

        Raises:
            ConfigError: names the block.
        """
        for name in blocks:
            block = self._model.get_submodule(name)
            reference, before = self._places.get(id(block), (None, name))
            if reference is None or reference() is not block:
                continue  # the caller's own, which is on every rank
            if stage_of(before) != stage_of(name):
                raise ConfigError(
                    f"the block {before!r} of {type(self._model).__name__} is now {name!r}, which another rank runs; that rank "
                    "has no weights for it. Take blocks out, or change their order, before `parallelize`: load the "
                    "transformer with from_pretrained and split it then."
                )
