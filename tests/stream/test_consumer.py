"""A slow consumer costs chunks or time, by choice; nothing is lost uncounted."""

import threading

import pytest

from dit_pipelining.errors import ConfigError
from dit_pipelining.stream.consumer import Consumer
from dit_pipelining.stream.metrics import StreamMetrics


@pytest.mark.parametrize(
    ("drop", "seen", "dropped"), [("oldest", [0, 4, 5], 3), ("newest", [0, 1, 2], 3), ("none", [0, 1, 2, 3, 4, 5], 0)]
)
def test_what_a_slow_consumer_does_not_get_is_counted(drop: str, seen: list[int], dropped: int) -> None:
    consumed: list[int] = []
    busy, free = threading.Event(), threading.Event()

    def consume(item: int) -> None:
        consumed.append(item)
        busy.set()
        free.wait(10)

    consumer = Consumer(consume, size=2, drop=drop)
    consumer.put(0)
    assert busy.wait(10)
    if drop == "none":
        free.set()
    for item in range(1, 6):
        consumer.put(item)
    free.set()
    consumer.close()
    assert consumed == seen
    assert consumer.dropped == dropped


def test_an_error_of_the_consumer_ends_the_stream() -> None:
    def fail(item: int) -> None:
        raise OSError(f"no space left for {item}")

    consumer = Consumer(fail, size=1, drop="none")
    consumer.put(0)
    with pytest.raises(OSError, match="no space left for 0"):
        consumer.close()
    with pytest.raises(OSError, match="no space left"):
        consumer.put(1)


def test_unknown_ways_to_drop_are_refused() -> None:
    with pytest.raises(ConfigError, match="drop='random'"):
        Consumer(print, drop="random")
    with pytest.raises(ConfigError, match="size=0"):
        Consumer(print, size=0)


def test_metrics_are_what_a_viewer_feels() -> None:
    times = iter([10.0, 12.0, 12.1, 13.0, 13.1])
    metrics = StreamMetrics(target_fps=10.0, now=lambda: next(times))
    assert metrics.read().first_frame is None
    for _ in range(4):  # due at 2.0, 2.4, 2.8 and 3.2 seconds; come at 2.0, 2.1, 3.0 and 3.1
        metrics.add(frames=4, latency=0.5)
    reading = metrics.read()
    assert (reading.frames, reading.first_frame, reading.latency, reading.misses) == (16, 2.0, 0.5, 1)
    assert reading.fps == pytest.approx(12 / 1.1)
