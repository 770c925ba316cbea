"""A queue of requests that join and leave a running pipeline between its denoising steps.

[Note: the door]
The requests in flight take turns in a ring (see runtime/turns.py), the same on every rank. A queue puts one more into the
ring, the door: at its turn rank 0 tells the others in one message which requests join, which are cancelled, and which have
ended how; so every rank lets them in, and ends them, at the same place of the ring. That is once per round, which is once per
denoising step of all requests in flight. While there are none, rank 0 waits at the door, and tells the others so once a
second.

A request may raise whatever its arguments and callbacks raise, if it does so on every rank: at the door the ranks compare how
requests have ended. One that ended on some ranks only makes no more of the calls that the others make, which ends the queue.
What goes wrong between the ranks or in a stage ends it too, whichever request meets it.
"""

import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from dit_pipelining.comm.waking import is_effect
from dit_pipelining.errors import ConfigError, InputError, QueueFullError
from dit_pipelining.runtime.bars import Advance, Bars
from dit_pipelining.runtime.modes import Enter, request_mode
from dit_pipelining.runtime.requests import request_call
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.runtime.submissions import TIMED_OUT, OnStep, RequestFuture, Submission, as_message
from dit_pipelining.runtime.turns import Request, RequestCancelledError
from partitioners.errors import counted

IDLE_SECONDS = 1.0
"""How often ranks that wait for a request tell each other that they are there."""


@dataclass(frozen=True)
class _Ended:
    """How a request has ended on a rank.

    Attributes:
        index: of the request.
        kind: the type of the error that it raised; empty: it returned.
        message: of the error, which may differ between ranks.
    """

    index: int
    kind: str
    message: str = field(compare=False)


@dataclass(frozen=True)
class _News:
    """What rank 0 tells the others at the door.

    Attributes:
        joining: index and pickled arguments of requests that join the ring.
        cancelled: index of requests that end at their next wait, and why.
        ended: those that have ended since the last time.
        closed: no request is left, and none will come.
    """

    joining: list[tuple[int, bytes]] = field(default_factory=list)
    cancelled: list[tuple[int, str]] = field(default_factory=list)
    ended: list[_Ended] = field(default_factory=list)
    closed: bool = False


class RequestQueue:
    """Made by `serve`.

    Attributes:
        leads: whether this rank takes requests; the others follow it.
    """

    def __init__(self, pipeline: Any, rolling: Rolling | None, max_in_flight: int, max_waiting: int) -> None:
        self.leads = rolling is None or rolling.mesh.world_rank == rolling.mesh.callers[0]
        self._pipeline = pipeline
        self._rolling = rolling
        self._max_in_flight = max_in_flight
        self._waiting: queue.Queue[Submission] = queue.Queue(max_waiting)
        self._submissions: dict[int, Submission] = {}
        self._running: dict[int, Request] = {}
        self._outputs: dict[int, Any] = {}
        self._ended: list[_Ended] = []
        self._count = 0
        self._closing = threading.Event()
        self._something = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=[request_mode()], name="queue", daemon=True)
        self._thread.start()

    def submit(self, *, timeout: float | None = None, on_step: OnStep | None = None, **arguments: Any) -> RequestFuture:
        """Put a request into the queue, on rank 0.

        Args:
            timeout: seconds from now after which the request is cancelled; its result raises TimeoutError.
            on_step: called after each of its denoising steps.
            arguments: of the pipeline's call, as they are now: the ranks get copies. Give a `generator` each: without one,
                every request starts from the same random state.

        Raises:
            QueueFullError: as many requests wait as the queue takes.
            InputError: an argument cannot be sent to the other ranks; names it.
            ConfigError: this rank does not lead.
        """
        if not self.leads:
            raise ConfigError("only rank 0 takes requests: submit them where `queue.leads` is true.")
        if self._error is not None:
            raise self._error
        message = b"" if self._rolling is None else as_message(arguments)
        with self._lock:
            if self._closing.is_set():
                raise ConfigError("the queue is closed; submit requests inside the `with serve(...)` block.")
            index, self._count = self._count, self._count + 1
            future = RequestFuture(lambda: self._ask(index, "it was cancelled"))
            deadline = None if timeout is None else time.monotonic() + timeout
            own = Submission(index, arguments, message, future, on_step, deadline)
            try:
                self._waiting.put_nowait(own)
            except queue.Full:
                raise QueueFullError(
                    f"the queue is full ({counted(self._waiting.maxsize, 'request')} waiting); try again later."
                ) from None
            self._submissions[index] = own
        self._something.set()
        return future

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait to join."""
        return self._waiting.qsize()

    def cancel_all(self) -> None:
        """Cancel what waits and what runs."""
        for own in list(self._submissions.values()):
            own.future.cancel()

    def close(self) -> None:
        """Take no more requests, finish those that were submitted, and end on every rank."""
        with self._lock:
            self._closing.set()
        self._something.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _ask(self, index: int, reason: str) -> None:
        with self._lock:
            if index in self._submissions:
                self._submissions[index].reason = reason
        self._something.set()

    def _serve(self, mode: Enter) -> None:
        try:
            with mode():
                if self._rolling is None:
                    self._serve_alone()
                else:
                    with self._rolling.call(f"serve a {type(self._pipeline).__name__}", {}):
                        self._rolling.run([self._door])
        except BaseException as error:
            self._error = error
        with self._lock:
            self._closing.set()
        for own in list(self._submissions.values()):
            if not own.future.done():
                own.future.set_exception(self._error or CancelledError())

    def _serve_alone(self) -> None:
        """A pipeline that is not spread over ranks runs its requests one after the other."""
        while not (self._closing.is_set() and self._waiting.empty()):
            try:
                own = self._waiting.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                continue
            if self._starts(own):
                self._call(own.index, partial(dict, own.arguments), _step_bars(own.on_step))()
                self._finish(self._ended.pop())

    def _door(self) -> None:
        rolling = self._rolling
        assert rolling is not None
        door = rolling.turns.current()
        while True:
            news = self._exchange(rolling)
            for index, reason in news.cancelled:
                if index in self._running:
                    self._running[index].cancelled = reason
            for index, message in news.joining:
                self._let_in(rolling, index, message)
            if news.closed:
                return
            door.submitted = 1  # so that the turn passes
            rolling.turns.end_turn()

    def _let_in(self, rolling: Rolling, index: int, message: bytes) -> None:
        own = self._submissions.get(index)
        bars = _step_bars(own.report if own is not None else None)
        # Rank 0 takes what it sends: a generator that several requests share would draw otherwise there.
        call = self._call(index, partial(pickle.loads, message), bars)
        self._running[index] = rolling.turns.join(index, rolling.on_own_stream(call))

    def _exchange(self, rolling: Rolling) -> _News:
        """Rank 0 says what is new; the others compare how their requests have ended."""
        message = [self._news() if self.leads else None]
        dist.broadcast_object_list(message, group_src=0, group=rolling.callers)
        news = message[0]
        assert isinstance(news, _News)
        mine, self._ended = self._ended, []
        if mine != news.ended:
            raise rolling.guard.fail(InputError(_disagreement(mine, news.ended, rolling.mesh.world_rank)))
        for ended in mine:
            self._finish(ended)
        return news

    def _news(self) -> _News:
        if not self._running and self._waiting.empty() and not self._closing.is_set():
            self._something.wait(IDLE_SECONDS)
        self._something.clear()
        joining: list[tuple[int, bytes]] = []
        room = self._max_in_flight - len(self._running) + len(self._ended)
        while room > len(joining) and not self._waiting.empty():
            own = self._waiting.get_nowait()
            if self._starts(own):
                joining.append((own.index, own.message))
        now = time.monotonic()
        for own in list(self._submissions.values()):
            if own.deadline is not None and now > own.deadline and not own.reason:
                own.reason = TIMED_OUT
        cancelled = [(i, own.reason) for i, own in list(self._submissions.items()) if own.reason and i in self._running]
        idle = not joining and len(self._running) == len(self._ended) and self._waiting.empty()
        return _News(joining, cancelled, list(self._ended), closed=idle and self._closing.is_set())

    def _starts(self, own: Submission) -> bool:
        """Whether a request that has waited still has to run."""
        if own.deadline is not None and time.monotonic() > own.deadline:
            own.reason = TIMED_OUT
        if not own.future.set_running_or_notify_cancel() or own.reason:
            if not own.future.done():
                own.future.set_exception(TimeoutError(own.reason) if own.reason == TIMED_OUT else CancelledError())
            del self._submissions[own.index]
            return False
        return True

    def _call(self, index: int, arguments: Callable[[], Mapping[str, Any]], bars: Bars) -> Callable[[], None]:
        """A request's thread: an error that is the request's own ends it alone."""

        def call() -> None:
            try:
                output, ended = request_call(self._pipeline, arguments(), bars)(), _Ended(index, "", "")
            except Exception as error:
                if self._has_failed(error):
                    raise
                message = "".join(traceback.format_exception_only(error)).strip()
                output, ended = error, _Ended(index, type(error).__name__, message)
            if index in self._submissions:
                self._outputs[index] = output
            self._ended.append(ended)

        return call

    def _has_failed(self, error: Exception) -> bool:
        """Whether an error in a request says that the run has failed."""
        rolling = self._rolling
        return rolling is not None and (
            rolling.guard.error is not None or rolling.turns.error is not None or is_effect(error)
        )

    def _finish(self, ended: _Ended) -> None:
        self._running.pop(ended.index, None)
        own = self._submissions.pop(ended.index, None)
        if own is None:
            return
        output = self._outputs.pop(ended.index)
        if own.error is not None:
            own.future.set_exception(own.error)
        elif ended.kind == RequestCancelledError.__name__:
            own.future.set_exception(TimeoutError(own.reason) if own.reason == TIMED_OUT else CancelledError())
        elif ended.kind:
            own.future.set_exception(output)
        else:
            own.future.set_result(output)


def _disagreement(here: Sequence[_Ended], on_first: Sequence[_Ended], rank: int) -> str:
    """That a request has ended otherwise on this rank than on rank 0, and how."""
    index = next(ended.index for ended in (*on_first, *here) if ended not in here or ended not in on_first)

    def told(every: Sequence[_Ended]) -> str:
        own = next((ended for ended in every if ended.index == index), None)
        return "still runs" if own is None else f"raised {own.message}" if own.kind else "returned"

    return (
        f"request {index} {told(on_first)} on rank 0, but {told(here)} on rank {rank}. A request acts alike on all ranks: "
        "what a callback does on one of them only must not raise."
    )


def _step_bars(on_step: OnStep | None) -> Bars:
    """Tell a function how many steps of the bar are done."""

    def begin(total: int | None) -> Advance:
        done = 0

        def advance(steps: int) -> None:
            nonlocal done
            done += steps
            if on_step is not None:
                on_step(done, total)

        return advance

    return Bars(begin)
