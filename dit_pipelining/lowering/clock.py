"""How long a stage takes, measured while it works."""

import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from dit_pipelining.capture.graph import BlockGraph

KEPT_CALLS = 64
"""Of each graph; older ones are forgotten."""

FEWEST_CALLS = 3
"""A time is valid from so many calls on: the first call of a graph also loads kernels and fills the allocator's pools."""


class StageClock:
    """Measures calls of a stage: by the host's clock on a CPU, by events on the stream on CUDA, which waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._calls: dict[int, deque[Any]] = {}

    @contextmanager
    def measured(self, graph: BlockGraph) -> Iterator[None]:
        """Measure what runs inside as one call of this graph."""
        calls = self._calls.setdefault(id(graph), deque(maxlen=KEPT_CALLS))
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            calls.append((start, end))
        else:
            begun = perf_counter()
            yield
            calls.append(perf_counter() - begun)

    def seconds_per_call(self) -> float | None:
        """Seconds of a call, over all graphs as often as each was called; None: too few calls so far.

        On CUDA, calls that the GPU has not finished do not count.
        """
        found = [times for calls in self._calls.values() if (times := list(_seconds(calls)))]
        number = sum(map(len, found))
        if number < FEWEST_CALLS:
            return None
        return sum(statistics.median(times) * len(times) for times in found) / number

    def reset(self) -> None:
        """Forget all calls."""
        self._calls.clear()


def _seconds(calls: "deque[Any]") -> Iterator[float]:
    for call in calls:
        if isinstance(call, float):
            yield call
        elif call[1].query():
            yield call[0].elapsed_time(call[1]) / 1000
