"""Calls of a text encoder that is cut over ranks: each of them makes the call with its part.

[Note: parts of a text encoder]
All ranks of a pipeline reach a call of an encoder with the same arguments, so a helper makes the very call that the lead
makes, and they meet in the sums over ranks within it. What the lead's call gave goes to all ranks, helpers too, as from an
encoder on one rank. Helpers take over the lead's random state, since `generate` may draw.

A call can raise on one rank only (no memory is left), while the others wait in a sum. So ranks tell the lead how their call
ended, and one whose call raised ends the run if that does not happen within `AGREEMENT_SECONDS`. What all raise alike (a
token that is in no vocabulary) is raised on all ranks as in one process, and the encoder stays usable.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dit_pipelining.comm.failure import AGREEMENT_SECONDS
from dit_pipelining.comm.portable_errors import portable
from dit_pipelining.random_state import random_state, set_random_state
from dit_pipelining.sharding.teams import Talk


class TextEncoderParts:
    """Runs the calls of one text encoder on all ranks that have a part of it.

    Args:
        name: of the encoder in its pipeline, for messages.
        talk: with the ranks that have to do with it.
        fail: ends the run because of an error.
    """

    needs_all = True

    def __init__(self, name: str, talk: Talk, fail: Callable[[BaseException], Any]) -> None:
        self.name = name
        self.talk = talk
        self.fail = fail

    def run(self, call: Callable[[], Any]) -> Any:
        """On the lead: one call of the encoder.

        Raises:
            Exception: what it raises, here or on a helper.
        """
        helpers = self.talk.links.helpers.values()
        for there, _ in helpers:
            self.talk.send(there, random_state(self.talk.device))
        result, error = _attempt(call)
        with self._ending_the_run_if_alone(error):
            theirs = [self.talk.receive(back) for _, back in helpers]
        first = error or next((other for other in theirs if other is not None), None)
        if first is not None:
            raise first
        return result

    def serve(self, call: Callable[[], Any]) -> None:
        """On another rank: make the same call; at once where this rank does not help. The lead raises what it raises."""
        if self.talk.own is None:
            return
        there, back = self.talk.own
        set_random_state(self.talk.receive(there), self.talk.device)
        _, error = _attempt(call)
        told = None if error is None else portable(error, f"raised by {self.name!r} on rank {self.talk.rank}")
        with self._ending_the_run_if_alone(error):
            self.talk.send(back, told)

    @contextmanager
    def _ending_the_run_if_alone(self, error: Exception | None) -> Iterator[None]:
        """What is done here waits for the other ranks; if they do not come, it was this error that kept them."""
        if error is None:
            yield
            return
        timer = threading.Timer(AGREEMENT_SECONDS, self.fail, [error])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join(AGREEMENT_SECONDS)  # a thread within the store's code would abort a process that ends meanwhile


def _attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error
