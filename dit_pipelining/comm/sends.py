"""Sends that are on their way, with what they read."""

from collections import deque
from collections.abc import Callable
from typing import Any

SENDS_IN_FLIGHT = 8
"""Sends that may be unfinished: gloo keeps a sent tensor until its work is waited for, and polling it leaks."""

SECONDS_TO_LEAVE = 60.0
"""How long a rank that leaves waits for its last transfers: another rank may have failed and never take them."""


class Sends:
    """Keeps what is sent until it has been; waits for the oldest send where there are too many."""

    def __init__(self) -> None:
        self._unfinished: deque[tuple[Any, Any]] = deque()

    def keep(self, work: Any, sent: Any) -> None:
        """One more: `work`, which has `wait`, reads `sent`."""
        self._unfinished.append((work, sent))
        while len(self._unfinished) > SENDS_IN_FLIGHT:
            self._unfinished.popleft()[0].wait()

    def finish(self, has_failed: Callable[[], bool] = lambda: False) -> None:
        """Wait for all, unless something has failed."""
        while self._unfinished and not has_failed():
            self._unfinished.popleft()[0].wait()
