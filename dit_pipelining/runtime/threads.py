"""Threads that are used again, since torch prepares much per thread (see [Note: the thread of the stage] in streams.py)."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Job = tuple[Callable[[], None], threading.Event]


class Threads:
    """Runs functions side by side, each in a thread whose earlier function has ended, or else in a new one.

    The threads are daemons: a function that hangs does not keep the process alive. They end with this object.
    """

    def __init__(self) -> None:
        self._all: list[SimpleQueue[Job | None]] = []
        self._idle: list[SimpleQueue[Job | None]] = []
        weakref.finalize(self, _end, self._all)

    def start(self, function: Callable[[], None]) -> threading.Event:
        """Start a function, which must not raise; returns what is set when it has ended."""
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            self._all.append(jobs)
            threading.Thread(target=_work, args=(jobs, self._idle), name="request", daemon=True).start()
        ended = threading.Event()
        jobs.put((function, ended))
        return ended


def _work(jobs: "SimpleQueue[Job | None]", idle: "list[SimpleQueue[Job | None]]") -> None:
    while (job := jobs.get()) is not None:
        function, ended = job
        function()
        del job, function
        idle.append(jobs)
        ended.set()


def _end(every: "list[SimpleQueue[Job | None]]") -> None:
    for jobs in every:
        jobs.put(None)
