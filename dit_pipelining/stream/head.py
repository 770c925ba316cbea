"""StreamHead: what the first stage adds: which chunks start when, and the latents of the rows."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dit_pipelining.errors import InputError
from dit_pipelining.stream.micro_step import ChunkFacts, MicroStep
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.schedule import Row, Start, first_tick, last_tick, next_start, rows
from dit_pipelining.stream.spec import StreamSpec


@dataclass(frozen=True)
class StreamInput:
    """What a source gives for one chunk.

    Attributes:
        latents: of the chunk of a video to be changed, normalised as the model wants them, (1, channels, frames, height,
            width). None: a chunk made of noise alone.
        noise_scale: sigma of the chunk's first level; None: that of the spec.
        prompt: another prompt's embedding from this chunk on, (1, tokens, channels).
        first: forget the stream's earlier chunks (a cut, another user).
    """

    latents: torch.Tensor | None = None
    noise_scale: float | None = None
    prompt: torch.Tensor | None = None
    first: bool = False


class Levels(Protocol):
    """Says which noise levels the next chunks pass; see levels.py."""

    def started(self, waited: bool) -> None:
        """A chunk of the first stream has started; `waited`: its source had nothing for a while before it."""

    def wanted(self, busy: float) -> Sequence[float] | None:
        """Other levels from the next chunk on; None: as they are. `busy`: the largest share of time that a stage works."""


class Pending:
    """What a live source gives while it has no chunk yet."""


PENDING = Pending()

Source = Iterator[StreamInput | Pending]


@dataclass
class _InFlight:
    start: Start
    facts: ChunkFacts


@dataclass(frozen=True)
class Tick:
    """What the first stage does at a tick.

    Attributes:
        step: the rows; None: nothing to do yet.
        prompts: prompt changes to announce before: stream, first chunk, embedding.
        fresh: latents from the source for rows of this tick, by stream.
        levels: other noise levels, from the next chunks on; then there is no step, and nothing is in flight.
    """

    step: MicroStep | None
    prompts: tuple[tuple[int, int, torch.Tensor], ...] = ()
    fresh: tuple[tuple[int, torch.Tensor], ...] = ()
    levels: tuple[float, ...] = ()


class StreamHead:
    """Starts chunks as soon as their source has them and the spec allows it.

    Args:
        spec: of the streams.
        num_stages: of the pipeline.
        noise: the noise of chunks.
        sources: of each stream.
        levels: changes the noise levels while the streams run; None: they stay.
    """

    def __init__(
        self,
        spec: StreamSpec,
        num_stages: int,
        noise: NoiseSource,
        sources: Sequence[Source],
        levels: Levels | None = None,
    ) -> None:
        if len(sources) != spec.streams:
            raise InputError(f"{len(sources)} sources for {spec.streams} streams; give one per stream.")
        self.spec = spec
        self.num_stages = num_stages
        self.noise = noise
        self.tick = 0
        self._sources: list[Source | None] = list(sources)
        self._chunks = [0] * spec.streams
        self._earliest = [first_tick(stream, num_stages, spec) for stream in range(spec.streams)]
        self._levels = levels
        self._next_levels: tuple[float, ...] = ()
        self._waited = False
        self._in_flight: list[_InFlight] = []
        self._ready: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def finished(self) -> bool:
        """Whether all sources have ended and everything has come out."""
        return not self._in_flight and all(source is None for source in self._sources)

    def next_tick(self, busy: float = 0.0) -> Tick:
        """Go on to the next tick at which there are rows.

        Args:
            busy: the largest share of the time that a stage works, for what changes the levels.

        Returns:
            a tick without a step if the sources have nothing and nothing is in flight, or if the levels change.
        """
        if self._levels is not None and not self._next_levels:
            self._next_levels = tuple(self._levels.wanted(busy) or ())
        while not self.finished:
            if self._next_levels and not self._in_flight:
                return Tick(None, levels=self._change_levels())
            prompts, fresh, waiting = self._start_chunks() if not self._next_levels else ([], [], False)
            found = rows(self.tick, self.num_stages, self.spec, [own.start for own in self._in_flight])
            if found:
                facts = {(own.start.stream, own.start.chunk): own.facts for own in self._in_flight}
                step = MicroStep(self.tick, tuple(found), tuple(facts[row.stream, row.chunk] for row in found))
                self._in_flight = [
                    own for own in self._in_flight if last_tick(own.start, self.num_stages, self.spec) > self.tick
                ]
                self.tick += 1
                return Tick(step, tuple(prompts), tuple(fresh))
            self._waited = self._waited or waiting
            if waiting and not self._in_flight:
                break
            self.tick += 1
        return Tick(None)

    def latents(self, step: MicroStep, fresh: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """The latents of the rows of a step, (rows, channels, frames, height, width).

        Those of first passes are made of noise and what the source gave; all others must have been taken back.
        """
        given = dict(fresh)
        made: dict[tuple[int, int], torch.Tensor] = {}
        for row, facts in zip(step.rows, step.facts, strict=True):
            key = (row.stream, row.chunk)
            if key in made:
                continue  # the other branch of guidance
            if row.level == 0:
                made[key] = first_latents(row, facts, given.get(row.stream), self.noise)
            else:
                made[key] = self._ready.pop(key)
        return torch.cat([made[row.stream, row.chunk] for row in step.rows])

    def has_latents(self, step: MicroStep) -> bool:
        """Whether everything has been taken back that the rows of a step need."""
        return all(row.level == 0 or (row.stream, row.chunk) in self._ready for row in step.rows)

    def take_back(self, step: MicroStep, latents: torch.Tensor) -> None:
        """What the last stage made of the rows that pass on to another level, in their order."""
        going_on = returned_rows(step, self.spec)
        for row, own in zip(going_on, latents.split(1), strict=True):
            self._ready[row.stream, row.chunk] = own

    def _change_levels(self) -> tuple[float, ...]:
        levels, self._next_levels = self._next_levels, ()
        self.spec = replace(self.spec, levels=levels)
        self._earliest = [
            self.tick + first_tick(stream, self.num_stages, self.spec) for stream in range(self.spec.streams)
        ]
        return levels

    def _start_chunks(self) -> tuple[list[Any], list[Any], bool]:
        prompts: list[tuple[int, int, torch.Tensor]] = []
        fresh: list[tuple[int, torch.Tensor]] = []
        waiting = False
        for stream, source in enumerate(self._sources):
            if source is None or self._earliest[stream] > self.tick:
                continue
            given = next(source, None)
            if given is None:
                self._sources[stream] = None
                continue
            if isinstance(given, Pending):
                waiting = True
                continue
            chunk = self._chunks[stream]
            start = Start(stream, chunk, self.tick)
            is_first = given.first or chunk == 0
            facts = ChunkFacts(self._noise_scale(given), is_first, given.latents is not None, time.time())
            self._in_flight.append(_InFlight(start, facts))
            self._chunks[stream] += 1
            if self._levels is not None and stream == 0:
                self._levels.started(self._waited)
                self._waited = False
            self._earliest[stream] = next_start(start, self.num_stages, self.spec)
            if given.prompt is not None:
                prompts.append((stream, chunk, given.prompt))
            if given.latents is not None:
                self._check(given.latents)
                fresh.append((stream, given.latents))
        return prompts, fresh, waiting

    def _noise_scale(self, given: StreamInput) -> float:
        scale = self.spec.levels[0] if given.noise_scale is None else float(given.noise_scale)
        if not 0 < scale <= 1:
            raise InputError(f"noise_scale={given.noise_scale!r}: expected a number above 0 and at most 1.")
        return scale

    def _check(self, latents: torch.Tensor) -> None:
        if tuple(latents.shape) != self.noise.shape:
            raise InputError(f"a source gave latents shaped {tuple(latents.shape)}; chunks are {self.noise.shape}.")


def first_latents(row: Row, facts: ChunkFacts, given: torch.Tensor | None, noise: NoiseSource) -> torch.Tensor:
    """What a chunk is made of when it starts: (1 - s) * video + s * noise."""
    drawn = noise(row.stream, row.chunk, 0)
    if given is None:
        return facts.noise_scale * drawn
    return (1 - facts.noise_scale) * given.to(drawn.device, drawn.dtype) + facts.noise_scale * drawn


def returned_rows(step: MicroStep, spec: StreamSpec) -> list[Row]:
    """The rows of a step that go on to another pass: one for both branches of guidance."""
    return [row for row in step.rows if row.branch == 0 and row.level < spec.passes - 1]


def given_streams(step: MicroStep) -> list[int]:
    """The streams whose source gave latents for a first pass in this step, in the order of `Tick.fresh`."""
    pairs = zip(step.rows, step.facts, strict=True)
    return [row.stream for row, facts in pairs if row.branch == 0 and row.level == 0 and facts.given]


def endless(make: Callable[[], StreamInput] = StreamInput) -> Source:
    """A source of chunks made of noise alone that does not end."""
    while True:
        yield make()
