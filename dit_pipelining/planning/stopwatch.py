"""How long something takes on a device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP_CALLS = 2
MOST_CALLS = 15
FEWEST_CALLS = 3
SECONDS_PER_PART = 2.0
"""Measuring a part ends after so long, if it has been called `FEWEST_CALLS` times."""


def median_seconds(function: Callable[[], Any], device: torch.device, most_calls: int = MOST_CALLS) -> float:
    """The median time of a call, after a warm-up.

    On CUDA the device is timed, from event to event, so that what the host does ahead costs nothing.
    """
    for _ in range(min(WARM_UP_CALLS, most_calls)):
        function()
    _synchronize(device)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < min(FEWEST_CALLS, most_calls) or (
        len(seconds) < most_calls and time.perf_counter() - began < SECONDS_PER_PART
    ):
        seconds.append(_once(function, device))
    return statistics.median(seconds)


def _once(function: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
