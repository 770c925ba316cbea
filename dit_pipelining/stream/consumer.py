"""Consumer: hands chunks to something slow without holding up the stream."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from dit_pipelining.config_checks import check_positive
from dit_pipelining.errors import ConfigError

DROPS = ("oldest", "newest", "none")

Item = TypeVar("Item")


class Consumer(Generic[Item]):
    """A bounded queue, and a thread that consumes what is in it.

    Args:
        consume: called in the thread with each item.
        size: the most items that wait.
        drop: what goes when one more comes: the `"oldest"` in the queue (a viewer wants to see what is now), the
            `"newest"`, which has just come (what is shown has no jumps back), or `"none"`: the stream waits.

    Attributes:
        dropped: items that were.

    Raises:
        ConfigError: a value cannot be used.
    """

    def __init__(self, consume: Callable[[Item], None], size: int = 4, drop: str = "oldest") -> None:
        check_positive("size", size)
        if drop not in DROPS:
            raise ConfigError(f"drop={drop!r}: expected one of {', '.join(DROPS)}.")
        self.dropped = 0
        self._consume, self._size, self._drop = consume, size, drop
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="consumer", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Hand over an item.

        Raises:
            Exception: what consuming an earlier one raised.
        """
        with self._changed:
            if self._drop == "none":
                self._changed.wait_for(lambda: len(self._waiting) < self._size or self._error is not None)
            if self._error is not None:
                raise self._error
            if len(self._waiting) == self._size:
                self.dropped += 1
                if self._drop == "newest":
                    return
                self._waiting.popleft()
            self._waiting.append(item)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until everything in the queue is consumed.

        Raises:
            Exception: what consuming raised.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                item = self._waiting.popleft()
                self._changed.notify_all()
            try:
                self._consume(item)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
