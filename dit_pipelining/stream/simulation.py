"""How fast a stream runs on stages of known cost: the schedule's own rows, played through with times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dit_pipelining.errors import ConfigError
from dit_pipelining.stream.schedule import Row, Start, last_tick, rows, steady_starts
from dit_pipelining.stream.spec import StreamSpec

CHUNKS = 24
"""Chunks of each stream that are played through, besides those that fill the pipeline."""

Schedule = Callable[[int, Sequence[Start]], list[Row]]
"""The rows of a tick, from its number and the starts of the chunks in flight."""


@dataclass(frozen=True)
class StageCost:
    """Seconds of one stage: `fixed + per_row * rows` for a tick, and besides for each chunk that starts or finishes.

    Attributes:
        fixed: a: reading weights, launching kernels.
        per_row: b: the work of a row.
        per_start: of each chunk that starts: encoding, on the first stage.
        per_finish: of each chunk that finishes: decoding, where the last stage does it.
    """

    fixed: float
    per_row: float
    per_start: float = 0.0
    per_finish: float = 0.0

    def seconds(self, step: Sequence[Row], num_levels: int) -> float:
        if not step:
            return 0.0
        own = [row.level for row in step if row.branch == 0]
        ends = self.per_start * own.count(0) + self.per_finish * own.count(num_levels - 1)
        return self.fixed + self.per_row * len(step) + ends


@dataclass(frozen=True)
class Forecast:
    """What comes out, in the steady state.

    Attributes:
        chunks_per_second: of each stream.
        latency: seconds from the start of a chunk to its end.
        first_chunk: seconds from the start of the stream to its first chunk.
        busy: share of the time that each stage works.
    """

    chunks_per_second: float
    latency: float
    first_chunk: float
    busy: tuple[float, ...]


def fit_cost(samples: Sequence[tuple[int, float]]) -> StageCost:
    """A and b of a stage by least squares from measured micro-steps; samples of one size give no b.

    Args:
        samples: rows and seconds.

    Raises:
        ConfigError: there are none.
    """
    if not samples:
        raise ConfigError("no micro-step was measured on a stage; run the stream for a few chunks first.")
    by_rows: dict[int, list[float]] = {}
    for count, seconds in samples:
        by_rows.setdefault(count, []).append(seconds)
    # The median of each size: the first run of a size is slow, and so is one that something else disturbed.
    points = [(count, sorted(times)[len(times) // 2]) for count, times in by_rows.items()]
    mean_rows = sum(count for count, _ in points) / len(points)
    mean_seconds = sum(seconds for _, seconds in points) / len(points)
    spread = sum((count - mean_rows) ** 2 for count, _ in points)
    slope = sum((count - mean_rows) * (seconds - mean_seconds) for count, seconds in points) / spread if spread else 0.0
    slope = min(max(slope, 0.0), mean_seconds / mean_rows)
    return StageCost(mean_seconds - slope * mean_rows, slope)


def simulate(spec: StreamSpec, stages: Sequence[StageCost], schedule: Schedule | None = None) -> Forecast:
    """Play a steady flow through the stages.

    Stage r starts tick m when it is done with tick m - 1 and the stage before is done with tick m; the first stage also
    waits for what the last one sends back.

    Args:
        spec: of the streams.
        stages: what a tick costs on each.
        schedule: the rows of each tick; default: `schedule.rows` on these stages, as the executor runs them.
    """
    num_stages = len(stages)
    rows_of = schedule or (lambda tick, starts: rows(tick, num_stages, spec, starts))
    edge = spec.passes * num_stages  # chunks that fill the pipeline, and as many that empty it
    starts = list(steady_starts(num_stages, spec, CHUNKS + 2 * edge))
    ends = {start: last_tick(start, num_stages, spec) for start in starts}
    final = max(ends.values())
    done: list[dict[int, float]] = [{} for _ in stages]
    began: dict[int, float] = {}
    worked = [0.0] * num_stages
    for tick in range(final + 1):
        alive = [start for start, end in ends.items() if start.tick <= tick <= end]
        step = rows_of(tick, alive)
        ready = done[-1].get(tick - num_stages, 0.0) if any(row.level for row in step) else 0.0
        for number, (stage, own) in enumerate(zip(stages, done, strict=True)):
            begin = max(ready, own.get(tick - 1, 0.0))
            if number == 0:
                began[tick] = begin
            seconds = stage.seconds(step, spec.num_levels)
            worked[number] += seconds
            own[tick] = ready = begin + seconds
    return _forecast(spec, starts, num_stages, began, done[-1], worked)


def _forecast(
    spec: StreamSpec,
    starts: Sequence[Start],
    num_stages: int,
    began: dict[int, float],
    done: dict[int, float],
    worked: Sequence[float],
) -> Forecast:
    finish = {start: done[start.tick + (spec.num_levels - 1) * num_stages] for start in starts}
    own = [start for start in starts if start.stream == 0]
    edge = spec.passes * num_stages
    early, late = own[edge], own[-edge - 1]
    total = max(done.values())
    return Forecast(
        chunks_per_second=(late.chunk - early.chunk) / max(finish[late] - finish[early], 1e-12),
        latency=finish[late] - began[late.tick],
        first_chunk=finish[own[0]],
        busy=tuple(seconds / max(total, 1e-12) for seconds in worked),
    )
