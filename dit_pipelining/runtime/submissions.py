"""Requests that were submitted to a queue: what they hold until they have ended, and how they go to the other ranks."""

import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dit_pipelining.errors import InputError

TIMED_OUT = "its time was over"

OnStep = Callable[[int, int | None], None]
"""Takes the steps that are done, and their number if it is known."""


class RequestFuture(Future[Any]):
    """The result of a request; `cancel` also ends one that runs, at its next step."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self._ask = ask

    def cancel(self) -> bool:
        """Returns False if the result was there already. The result of a cancelled request raises CancelledError."""
        if super().cancel():
            return True
        if self.done():
            return False
        self._ask()
        return True


@dataclass(eq=False)
class Submission:
    """One request on the rank that leads.

    Attributes:
        index: in the order in which they were submitted.
        arguments: of the pipeline's call.
        message: these, as they go to the other ranks.
        future: of the result.
        on_step: called after each of its steps.
        deadline: when its time is over, on the monotonic clock.
        reason: why it has to end; empty: it has not.
        error: what `on_step` raised.
    """

    index: int
    arguments: Mapping[str, Any]
    message: bytes
    future: RequestFuture
    on_step: OnStep | None
    deadline: float | None
    reason: str = ""
    error: Exception | None = None

    def report(self, done: int, total: int | None) -> None:
        """Call `on_step`, which is there on rank 0 only: what it raises is kept, to end the request at the door."""
        if self.on_step is not None and self.error is None:
            try:
                self.on_step(done, total)
            except Exception as error:
                self.error, self.reason = error, "its on_step raised an error"


def as_message(arguments: Mapping[str, Any]) -> bytes:
    """A request as it goes to the other ranks; what cannot must fail here, since at the door it would end the queue.

    Raises:
        InputError: names the argument.
    """
    try:
        message = pickle.dumps(dict(arguments))
        pickle.loads(message)
        return message
    except Exception as error:
        name = next((name for name, value in arguments.items() if not _can_travel(value)), "a request")
        raise InputError(
            f"{name}={arguments.get(name)!r} cannot be sent to the other ranks ({type(error).__name__}: {error}). A function "
            "has to be one of a module, neither a lambda nor one inside another function; for progress use `on_step`."
        ) from None


def _can_travel(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True
