"""Bars: what stands in for a pipeline's progress bar, and hands on what the bars are told."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

Advance = Callable[[int], object]
"""Takes how many steps are done more."""


class Bars:
    """Stands in for `pipeline.progress_bar`.

    Args:
        begin: takes the number of steps of a bar that begins, if it is known; returns what its steps go to.
    """

    def __init__(self, begin: Callable[[int | None], Advance]) -> None:
        self.begin = begin

    def __call__(self, iterable: Any = None, total: int | None = None) -> Any:
        bar = _Bar(self.begin(len(iterable) if iterable is not None else total))
        return bar if iterable is None else bar.over(iterable)


class _Bar(AbstractContextManager["_Bar"]):
    def __init__(self, advance: Advance) -> None:
        self._advance = advance

    def update(self, steps: int = 1) -> None:
        self._advance(steps)

    def over(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            yield item
            self.update()

    def set_postfix(self, *args: Any, **kwargs: Any) -> None:
        """As tqdm's; there is no room for it."""

    def __exit__(self, *error: object) -> None:
        return None
