"""Noise levels that change while a stream runs: fewer where it misses its deadlines, more where there is time.

[Note: another set of levels]
When the levels change at a chunk, the chunks before it finish first (nothing is in flight for a moment, the latency of one
chunk). Then every new level takes over the keys and values of the old level that is nearest to it, and the chunk goes on
from there: levels that stay go on as if nothing had been, and one that comes back sees the earlier chunks as they were at
the level next to it, since at its own they have not been.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dit_pipelining.config_checks import check_positive
from dit_pipelining.stream.spec import StreamSpec, fewer_levels
from dit_pipelining.stream.stage import StreamStage

PATIENCE = 8
"""Chunks that are looked at before levels are given up; four times as many before one is taken back."""

HEADROOM = 0.85
"""The share of the time that stages may be busy after a level was taken back."""


@dataclass(frozen=True)
class _Started:
    at: float
    waited: bool


class AdaptiveLevels:
    """The `Levels` of a head: gives up a level when chunks start late, and takes one back when there is time for it.

    A chunk is late if it started later after the one before than the frame rate allows, although its source had it. Of
    `PATIENCE` chunks more than half must be late; and for a level more none of four times as many, and the stages as busy
    as they will be then must have `HEADROOM`.

    Args:
        levels: the most that may be used, falling.
        seconds: from one chunk to the next, at the frame rate that is wanted.
        now: a clock in seconds.
    """

    def __init__(self, levels: Sequence[float], seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        check_positive("number of levels", len(levels))
        self.most = tuple(levels)
        self.seconds = seconds
        self.count = len(levels)
        self._now = now
        self._starts: deque[_Started] = deque(maxlen=4 * PATIENCE + 1)

    def started(self, waited: bool) -> None:
        self._starts.append(_Started(self._now(), waited))

    def wanted(self, busy: float) -> Sequence[float] | None:
        starts = list(self._starts)
        late = [not other.waited and other.at - one.at > self.seconds for one, other in pairwise(starts)]
        if len(late) >= PATIENCE and 2 * sum(late[-PATIENCE:]) > PATIENCE and self.count > 1:
            return self._use(self.count - 1)
        if len(late) == 4 * PATIENCE and not any(late) and self.count < len(self.most):
            interval = (starts[-1].at - starts[0].at) / len(late)
            if busy * interval * (self.count + 1) / self.count <= HEADROOM * self.seconds:
                return self._use(self.count + 1)
        return None

    def _use(self, count: int) -> Sequence[float]:
        self.count = count
        self._starts.clear()
        return fewer_levels(self.most, count)


def nearest_levels(before: Sequence[float], after: Sequence[float]) -> list[int]:
    """For each new level the number of the old one that is nearest to it; of two as near, the one with less noise."""
    return [min(range(len(before)), key=lambda old: (abs(before[old] - level), before[old])) for level in after]


def change_levels(stages: Sequence[StreamStage], levels: Sequence[float]) -> StreamSpec:
    """Let stages of this process go on with other levels, while nothing is in flight.

    Returns:
        the spec from now on.
    """
    before = stages[0].spec
    if before.levels == tuple(levels):
        return before
    spec = replace(before, levels=tuple(levels))
    sources = nearest_levels(before.levels, spec.levels) if before.policy == "level" else [0]
    for caches in {id(stage.caches): stage.caches for stage in stages}.values():
        caches.change_levels(spec, sources)
    for stage in stages:
        stage.change_spec(spec)
    return spec
