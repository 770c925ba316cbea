"""Turns: of all requests in flight exactly one runs, and they take turns in a fixed ring.

Every rank runs the same requests in the same order, so ranks submit the same calls in the same order, which is what keeps
their communication matched. A turn ends only where a request waits for a result, and only if it has submitted something
since its last turn: waiting for the second branch of a step must not give the turn away again (0.77 instead of 0.94 of the
ideal throughput).
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dit_pipelining.random_state import random_state, set_random_state
from dit_pipelining.runtime.modes import Enter, request_mode
from dit_pipelining.runtime.threads import Threads


class OtherRequestFailedError(RuntimeError):
    """Another request, or the stage of this rank, failed; the cause is attached."""


class RequestCancelledError(RuntimeError):
    """This request was cancelled; on every rank, at the same wait."""


@dataclass(eq=False)
class Request:
    """One request in flight.

    Attributes:
        index: its place among the requests.
        submitted: calls it has submitted since its turn began.
        cancelled: why it has to end at its next wait; empty: it has not.
        wake: told when its turn comes; one for each request, since all of them would wake up on one in common.
    """

    index: int
    submitted: int = 0
    random_state: list[torch.Tensor] = field(default_factory=list)
    cancelled: str = ""
    wake: threading.Condition = field(default_factory=threading.Condition)


_current: contextvars.ContextVar[Request | None] = contextvars.ContextVar("request", default=None)


@dataclass(eq=False)
class Turns:
    """The ring of requests, and whose turn it is."""

    alone: Request = field(default_factory=lambda: Request(0))
    error: BaseException | None = None
    _ring: list[Request] = field(default_factory=list)
    _turn: Request | None = None
    _mode: Enter | None = None
    _random_state: list[torch.Tensor] = field(default_factory=list)
    _threads: Threads = field(default_factory=Threads)
    _ended: list[threading.Event] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def current(self) -> Request:
        """The request this code runs for; one and the same outside `run`."""
        return _current.get() or self.alone

    @property
    def is_alone(self) -> bool:
        """Whether no other request could be in flight."""
        return self.current() is self.alone

    def end_turn(self) -> None:
        """Called before waiting for a result: lets the others run if this request has submitted something."""
        request = self.current()
        submitted, request.submitted = request.submitted, 0
        if submitted and len(self._ring) > 1 and request in self._ring:
            request.random_state = random_state()
            with self._lock:
                self._pass(request)
                self._await(request)
            set_random_state(request.random_state)
        if request.cancelled:
            raise RequestCancelledError(request.cancelled)

    def fail(self, error: BaseException) -> None:
        """Wake everyone: nothing can go on after an error on one of the calls."""
        with self._lock:
            self.error = self.error or error
            for request in self._ring:
                request.wake.notify()

    def run(self, functions: Sequence[Callable[[], Any]], in_flight: int | None = None) -> list[Any]:
        """Run functions as requests side by side, `in_flight` at a time; returns their results in order.

        Raises:
            BaseException: what a function raised first; the others end too.
        """
        if not functions:
            return []
        results: list[Any] = [None] * len(functions)
        waiting = list(enumerate(functions))

        def start_next() -> None:
            index, function = waiting.pop(0)

            def call() -> None:
                results[index] = function()
                if waiting:
                    start_next()

            self.join(index, call)

        self._random_state = random_state()
        self.error = None  # of an earlier run that failed alike on all ranks
        self._mode = request_mode()
        self._ended = []
        for _ in range(min(in_flight or len(functions), len(functions))):
            start_next()
        with self._lock:
            self._give_turn(self._ring[0])
        while unfinished := [ended for ended in self._ended if not ended.is_set()]:  # more are added while others run
            unfinished[0].wait(0.2)  # short, so that Ctrl-C is noticed
        set_random_state(self._random_state)
        self._turn = None
        if self.error is not None:
            raise self.error
        return results

    def join(self, index: int, function: Callable[[], None]) -> Request:
        """Let a function join the ring that runs, as its last request; called by the one whose turn it is."""
        mode = self._mode
        assert mode is not None  # `run` runs
        request = Request(index, random_state=self._random_state, wake=threading.Condition(self._lock))
        run = contextvars.copy_context().run
        with self._lock:
            self._ring.append(request)
        started = self._threads.start(lambda: run(self._run, request, function, mode))
        self._ended = [*(ended for ended in self._ended if not ended.is_set()), started]
        return request

    @property
    def others(self) -> int:
        """How many requests beside the one that asks are in the ring."""
        return len(self._ring) - 1

    def _run(self, request: Request, function: Callable[[], None], mode: Enter) -> None:
        _current.set(request)
        try:
            with self._lock:
                self._await(request)
            with mode():
                set_random_state(request.random_state)
                function()
        except OtherRequestFailedError:
            pass
        except BaseException as error:
            self.fail(error)
        with self._lock:
            if self._turn is request:
                self._pass(request)
            self._ring.remove(request)

    def _pass(self, request: Request) -> None:
        index = self._ring.index(request)
        self._give_turn(self._ring[(index + 1) % len(self._ring)])

    def _give_turn(self, request: Request) -> None:
        self._turn = request
        request.wake.notify()

    def _await(self, request: Request) -> None:
        request.wake.wait_for(lambda: self._turn is request or self.error is not None)
        if self.error is not None:
            raise OtherRequestFailedError("another request failed") from self.error
