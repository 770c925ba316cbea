"""First error wins: what ends one rank ends the run on all ranks, with a message that names the rank and the cause.

[Note: failure]
A thread on each rank shows a sign of life in the store twice a second and looks at what the others show: two requests to
the store, and nothing per denoising step. The first failure is written by compare-and-set, so all ranks name the same one.

- What a stage raises is written at once: the other ranks are waiting for this one.
- What the pipeline's own code raises (a wrong size, refused on every rank) can be the same everywhere, and then nothing
  is lost: no rank waits for another. So a rank whose call raised looks how the others' call ended. If all raised the same
  type after the same number of steps, each raises its own error and the pipeline stays usable. As soon as one is known to
  be elsewhere (further on, returned, raised something else), or does not come within `AGREEMENT_SECONDS`, it is a failure.
- A rank without a sign of life for `DEAD_SECONDS` is taken for dead. A lost connection or an aborted group is an effect: a
  rank that sees one waits for the cause, and takes a silent rank for dead after `SUSPECTED_DEAD_SECONDS`.
- A failure wakes all who wait: requests by their condition; gloo, whose abort wakes nobody, by a wait that times out,
  which closes the group's connections; NCCL by aborting its groups. A rank that is still in its call after
  `GRACE_SECONDS` prints the failure and exits with code 1. Nothing is flushed, synchronised or destroyed.
- The rank that hosts the store leaves when the others have read what they need.
"""

import atexit
import contextvars
import inspect
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist

from dit_pipelining.comm.board import RETURNED, Beat, Board, Failure
from dit_pipelining.comm.waking import is_effect, wake_group_waiters
from dit_pipelining.errors import InputError, RemoteRankError

BEAT_SECONDS = 0.5
DEAD_SECONDS = 30.0
SUSPECTED_DEAD_SECONDS = 3.0
AGREEMENT_SECONDS = 10.0
WAKING_SECONDS = 5.0
"""How long those are waited for that end the waits of this rank after a failure."""

GRACE_SECONDS = 5.0

LOST_BEATS = 3
"""Requests in a row that the store does not answer before it counts as gone."""

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside a guarded call", default=False)


class Guard:
    """Watches over the ranks of one launch; starts with the process group and ends with it.

    Args:
        board: on which all ranks have arrived.
        hosts_store: this process runs the store's server.

    Attributes:
        error: what this rank raises since the run has failed: its own error if that was the first, else one that tells
            which rank's was.
    """

    _all: ClassVar[weakref.WeakSet["Guard"]] = weakref.WeakSet()

    @classmethod
    def current(cls) -> "Guard | None":
        """The guard of the process group there is, if it has one that runs."""
        running = (
            own for own in list(cls._all) if own._is_current() and own.error is None and not own._closing.is_set()
        )
        return next(running, None)

    def __init__(self, board: Board, hosts_store: bool) -> None:
        self.board = board
        self.hosts_store = hosts_store
        self.error: BaseException | None = None
        self.failure: Failure | None = None
        self._on_failure: list[Callable[[], Callable[[BaseException], None] | None]] = []
        self._on_beat: list[Callable[[], Callable[[], str | None] | None]] = []
        self._world = dist.group.WORLD
        self._beat = Beat()
        self._steps = 0
        self._saying, self._tripping, self._calling = threading.Lock(), threading.Lock(), threading.Lock()
        self._failed, self._idle, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._idle.set()
        self._suspicious = False
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._all.add(self)

    def on_failure(self, wake: Callable[[BaseException], None]) -> None:
        """Call `wake` with this rank's error when the run fails; from whichever thread learns of it first.

        A method does not keep its object alive: pipelines come and go, the guard stays.
        """
        self._on_failure.append(_weakly(wake))

    def on_beat(self, problem: Callable[[], str | None]) -> None:
        """Ask at every beat whether this rank has a problem; what it has ends the run."""
        self._on_beat.append(_weakly(problem))

    def check(self) -> None:
        """Raise if the run has failed; asks nobody."""
        if self.error is not None:
            raise self.error

    def count_step(self) -> None:
        """This rank now communicates with the others: from here on it is ahead of one that raised before."""
        self._steps += 1  # one thread of a rank runs at a time; the next beat shows it

    @contextmanager
    def call(self, after_agreement: Callable[[], None] | None = None) -> Iterator[bool]:
        """One call that every rank makes; within another one it does nothing.

        Args:
            after_agreement: called before an error is raised that all ranks raise.

        Yields:
            whether this is the outermost.

        Raises:
            RemoteRankError: another rank failed first.
            InputError: another thread of this rank is in a call.
        """
        if _inside.get():
            yield False
            return
        self.check()
        if not self._calling.acquire(blocking=False):
            raise InputError(
                "another thread of this rank is in a call of a pipeline that is spread over ranks, and all ranks have to make "
                "their calls in one order. Make one at a time, or let requests run side by side with generate or serve."
            )
        try:
            with self._outermost(after_agreement):
                yield True
        finally:
            self._calling.release()

    @contextmanager
    def _outermost(self, after_agreement: Callable[[], None] | None) -> Iterator[None]:
        inside = _inside.set(True)
        self._steps = 0
        self._say(call=self._beat.call + 1, ended=None, send=False)
        self._idle.clear()
        try:
            yield
            self.check()  # waits that were ended by a failure may have left no data
            self._say(ended=RETURNED, send=False)
        except BaseException as error:
            if self._raised_everywhere(error):
                if after_agreement is not None:
                    after_agreement()
                raise
            first = self.fail(error)
            if first is error:
                raise
            raise first from None
        finally:
            self._idle.set()
            _inside.reset(inside)

    def fail(self, error: BaseException) -> BaseException:
        """End the run on all ranks because of `error`, unless it has failed already.

        Returns:
            what this rank has to raise: the error itself, or one that names the rank that failed first.
        """
        if self.error is None and is_effect(error):
            self._suspicious = True
            self._failed.wait(SUSPECTED_DEAD_SECONDS + LOST_BEATS * BEAT_SECONDS)
        if self.error is None:
            self._publish(self._behind(error) or Failure.raised(self.board.rank, error), error)
        assert self.error is not None
        return self.error

    def close(self) -> None:
        """Leave the run; the rank that hosts the store waits until the others have read what they need.

        A script that ends by an error which nothing caught has failed.
        """
        atexit.unregister(self.close)
        uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        self._closing.set()
        # A thread that is within the store's code when the interpreter ends would abort the process.
        self._thread.join(2 * GRACE_SECONDS)
        with suppress(RuntimeError):  # the store is gone: there is nobody to tell
            if uncaught is not None and self.failure is None:
                self.board.publish(Failure.raised(self.board.rank, uncaught))
            self._say(left=True, released=True)
            self._let_others_read()

    def _leave(self) -> None:
        if not self.hosts_store:
            atexit.unregister(self.close)
        with suppress(RuntimeError):
            self._say(left=True, released=True)

    def _say(self, send: bool = True, **changes: Any) -> None:
        with self._saying:
            self._beat = replace(self._beat, number=self._beat.number + 1, steps=self._steps, **changes)
            if send:
                self.board.say(self._beat)

    def _raised_everywhere(self, error: BaseException) -> bool:
        """Whether every rank's call raised an error of this type after as many steps."""
        if not isinstance(error, Exception) or is_effect(error):
            return False
        kind = type(error).__name__
        deadline = time.monotonic() + AGREEMENT_SECONDS
        try:
            self._say(ended=kind)
            own = self._beat
            while self.error is None and time.monotonic() < deadline:
                _, beats = self.board.read()
                agreeing = [beat.progress == own.progress and beat.ended == kind for beat in beats]
                if all(agreeing) or any(beat.agreed == own.call for beat in beats):
                    self._say(agreed=own.call)
                    return True
                if any(
                    beat.left or beat.progress > own.progress or (beat.call == own.call and beat.ended and not same)
                    for beat, same in zip(beats, agreeing, strict=True)
                ):
                    return False
                time.sleep(0.05)
        except RuntimeError:  # the store is gone, and with it a rank
            return False
        return False

    def _publish(self, failure: Failure, error: BaseException | None = None) -> None:
        first = failure
        with suppress(RuntimeError):  # the store is gone: this rank fails by itself
            first = self.board.publish(failure)
        self._trip(first, error if first == failure else None)

    def _trip(self, failure: Failure, error: BaseException | None = None) -> None:
        """The run has failed: remember why, and wake everybody on this rank."""
        with self._tripping:
            if self.error is not None:
                return
            if error is not None and not is_effect(error):
                error.add_note(f"This was raised on rank {self.board.rank}; it ends all {self.board.world_size} ranks.")
                self.error = error
            else:
                self.error = RemoteRankError(str(failure))
            self.failure = failure
        self._failed.set()
        # Each in a thread: one that is held up, by a driver whose GPU is stuck, must not keep this rank from ending.
        waking = [threading.Thread(target=wake, args=(self.error,), daemon=True) for wake in _alive(self._on_failure)]
        for thread in waking:
            thread.start()
        deadline = time.monotonic() + WAKING_SECONDS
        for thread in waking:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._is_current():
            wake_group_waiters()

    def _watch(self) -> None:
        heard = [(Beat(), time.monotonic())] * self.board.world_size
        lost = 0
        while self.error is None and not self._closing.wait(BEAT_SECONDS):
            if not self._is_current():
                self._leave()  # the process group was destroyed: the run is over
                return
            try:
                self._say()
                failure, beats = self.board.read()
                lost = 0
            except RuntimeError as error:
                lost += 1
                if lost == LOST_BEATS and heard[0][0].left:
                    return
                if lost == LOST_BEATS:
                    self._trip(Failure(0, f"the store is gone, and with it rank 0 or what launched it ({error})"))
                continue
            now = time.monotonic()
            heard = [old if old[0] == beat else (beat, now) for old, beat in zip(heard, beats, strict=True)]
            if failure is not None:
                self._trip(failure)
            elif (gone := self._gone(heard, now)) is not None:
                self._publish(gone)
            elif (own := self._own_problem()) is not None:
                self._publish(own)
            elif beats[0].left and not self._beat.released:
                self._say(released=True)
        if self.error is not None:
            self._end()

    def _own_problem(self) -> Failure | None:
        for ask in _alive(self._on_beat):
            try:
                problem = ask()
            except RuntimeError as error:  # of the device
                return Failure.raised(self.board.rank, error)
            if problem is not None:
                return Failure(self.board.rank, f"rank {self.board.rank} {problem}")
        return None

    def _gone(self, heard: Sequence[tuple[Beat, float]], now: float) -> Failure | None:
        """A rank that is dead, or that left although this one waits for it."""
        patience = SUSPECTED_DEAD_SECONDS if self._suspicious else DEAD_SECONDS
        for rank, (beat, last) in enumerate(heard):
            if rank == self.board.rank:
                continue
            if not beat.left and now - last > patience:
                return Failure(
                    rank,
                    f"rank {rank} has shown no sign of life for {now - last:.0f} s: it was killed, ran out of memory, or "
                    "its machine is gone.",
                )
            in_call = not self._idle.is_set()
            if beat.left and in_call and (beat.call < self._beat.call or not beat.ended):
                return Failure(
                    rank,
                    f"rank {rank} has ended, but rank {self.board.rank} waits for it: every rank has to make the same "
                    "calls.",
                )
        return None

    def _behind(self, error: BaseException) -> Failure | None:
        """If this rank waited in vain for one that has not begun the same call: that."""
        if is_effect(error) and not self._idle.is_set():
            with suppress(RuntimeError):
                for rank, beat in enumerate(self.board.read()[1]):
                    if beat.call < self._beat.call:
                        return Failure(
                            rank,
                            f"rank {rank} did not make the call in which rank {self.board.rank} waited for it: every rank "
                            f"has to make the same calls. ({error})",
                        )
        return None

    def _end(self) -> None:
        """After a failure: who is still in its call when the grace period is over does not hold up the others."""
        with suppress(RuntimeError):
            self._say(released=True)
        if not self._idle.wait(GRACE_SECONDS):
            print(f"[rank {self.board.rank}] {self.failure}", file=sys.stderr, flush=True)
            with suppress(RuntimeError):
                self._let_others_read()
            os._exit(1)

    def _let_others_read(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        while self.hosts_store and time.monotonic() < deadline:
            dead = self.failure.rank if self.failure is not None else None
            if all(
                beat.released for rank, beat in enumerate(self.board.read()[1]) if rank not in (self.board.rank, dead)
            ):
                break
            time.sleep(0.05)

    def _is_current(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self._world


Function = TypeVar("Function", bound=Callable[..., Any])


def _weakly(function: Function) -> Callable[[], Function | None]:
    return weakref.WeakMethod(function) if inspect.ismethod(function) else lambda: function


def _alive(references: Sequence[Callable[[], Function | None]]) -> Iterator[Function]:
    for reference in list(references):
        function = reference()
        if function is not None:
            yield function
