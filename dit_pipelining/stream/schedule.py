"""Which rows run at which tick: a pure function of when each chunk was started.

[Note: ticks]
A pipeline of W stages takes in one batch of rows per tick, and stage r runs the batch of tick m at time m + r. What the
last stage makes of a row is back at the first stage W ticks after the row went in. So pass i of a chunk that was started at
tick s runs at tick s + i * W. With one new chunk per tick, started from tick 0 on, row i of tick m holds chunk m - i * W.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dit_pipelining.stream.spec import StreamSpec


@dataclass(frozen=True, order=True)
class Row:
    """One pass of one chunk.

    Attributes:
        branch: 0 with the prompt, 1 without (guidance).
        stream: which video.
        level: number of the pass; the number of levels stands for the pass over the finished chunk.
        chunk: number of the chunk in its stream.
    """

    branch: int
    stream: int
    level: int
    chunk: int


@dataclass(frozen=True)
class Start:
    """When the first pass of a chunk goes into the pipeline."""

    stream: int
    chunk: int
    tick: int


def rows(tick: int, num_stages: int, spec: StreamSpec, starts: Iterable[Start]) -> list[Row]:
    """The rows that go into the pipeline at a tick, valid ones only, in the order of their caches.

    Args:
        tick: number of the tick.
        num_stages: of the pipeline.
        spec: of the streams.
        starts: of the chunks in flight; others do no harm. `steady_starts` for a steady flow.
    """
    found = []
    for start in starts:
        number, rest = divmod(tick - start.tick, num_stages)
        if rest == 0 and 0 <= number < spec.passes:
            found += [Row(branch, start.stream, number, start.chunk) for branch in range(spec.branches)]
    return sorted(found)


def last_tick(start: Start, num_stages: int, spec: StreamSpec) -> int:
    """The tick of a chunk's last pass."""
    return start.tick + (spec.passes - 1) * num_stages


def next_start(start: Start, num_stages: int, spec: StreamSpec) -> int:
    """The first tick at which the next chunk of the stream may start.

    A pass must find the keys and values that it may see. With policy `level` the chunk before has gone through every stage
    at this level one tick earlier; otherwise that is so from one tick after its last pass on.
    """
    return start.tick + 1 if spec.policy == "level" else last_tick(start, num_stages, spec) + 1


def steady_starts(num_stages: int, spec: StreamSpec, chunks: int) -> Iterator[Start]:
    """The starts of `chunks` chunks of every stream that all come as early as they may."""
    for stream in range(spec.streams):
        start = Start(stream, 0, first_tick(stream, num_stages, spec))
        for chunk in range(chunks):
            yield start
            start = Start(stream, chunk + 1, next_start(start, num_stages, spec))


def first_tick(stream: int, num_stages: int, spec: StreamSpec) -> int:
    """Streams of one pass per tick share their ticks; others fill each other's gaps."""
    return 0 if spec.policy == "level" else stream % num_stages
