"""StreamMetrics: what a viewer feels: frames per second, time to the first frame, latency, missed deadlines."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW = 16
"""Chunks over which the frame rate is taken."""


@dataclass(frozen=True)
class Reading:
    """The state of a stream.

    Attributes:
        frames: so far.
        fps: frames per second over the last chunks; 0 before the second.
        first_frame: seconds from the start to the first frame; None before.
        latency: seconds of the last chunk from its source to its frames.
        misses: chunks that came after the time at which their first frame was due.
    """

    frames: int
    fps: float
    first_frame: float | None
    latency: float
    misses: int


class StreamMetrics:
    """Counts the chunks of a stream as they come.

    A chunk's deadline is the time to the first frame plus its first frame's number over the rate: whoever began to show the
    video when it began would have to wait.

    Args:
        target_fps: the rate at which frames are shown.
        now: a clock in seconds.
    """

    def __init__(self, target_fps: float, now: Callable[[], float] = time.monotonic) -> None:
        self.target_fps = target_fps
        self._now = now
        self._started = now()
        self._first: float | None = None
        self._frames = self._misses = 0
        self._latency = 0.0
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def add(self, frames: int, latency: float) -> None:
        """A chunk has come."""
        now = self._now()
        if self._first is None:
            self._first = now
        elif now > self._first + self._frames / self.target_fps:
            self._misses += 1
        self._frames += frames
        self._latency = latency
        self._recent.append((now, self._frames))

    def read(self) -> Reading:
        fps = 0.0
        if len(self._recent) > 1:
            (begin, before), (end, after) = self._recent[0], self._recent[-1]
            fps = (after - before) / max(end - begin, 1e-9)
        first = None if self._first is None else self._first - self._started
        return Reading(self._frames, fps, first, self._latency, self._misses)
