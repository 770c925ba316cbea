"""StreamBatchScheduler: how many levels, streams and frames per chunk meet a frame rate and a latency."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from dit_pipelining.errors import ConfigError
from dit_pipelining.stream.schedule import Row, Start, rows
from dit_pipelining.stream.simulation import Forecast, StageCost, simulate
from dit_pipelining.stream.spec import FRAMES_PER_LATENT, StreamSpec, fewer_levels
from partitioners.errors import counted

GUIDANCE = ("rows", "replicas")
"""Ways of running the branches of guidance: as rows of one pipeline, or in a pipeline for each."""


@dataclass(frozen=True)
class StreamChoice:
    """A configuration and what it is expected to give.

    Attributes:
        spec: of the streams.
        guidance: how both branches of guidance run: `"rows"` of one batch, `"replicas"`: a pipeline for each branch, or
            None without guidance.
        fps: frames per second of each stream.
        latency: seconds from a chunk's start to its end.
        first_frame: seconds until the first frame.
        busy: share of the time that each stage works.
        faster_guidance: the other way of guidance, where the ranks would give more frames laid out for it.
    """

    spec: StreamSpec
    guidance: str | None
    fps: float
    latency: float
    first_frame: float
    busy: tuple[float, ...]
    faster_guidance: str | None = None


class StreamBatchScheduler:
    """Chooses a stream's configuration by playing it through with measured costs.

    Args:
        stages: what a tick costs on each stage, with chunks of `measured.frames_per_chunk` frames.
        measured: the spec that the costs were measured with.
        frames_per_latent: of the VAE.
        replicas: pipelines of these stages. All their ranks together can be laid out as one pipeline whose rows are of both
            branches of guidance, or as a pipeline for each branch.
    """

    def __init__(
        self,
        stages: Sequence[StageCost],
        measured: StreamSpec,
        *,
        frames_per_latent: int = FRAMES_PER_LATENT,
        replicas: int = 1,
    ) -> None:
        if not stages:
            raise ConfigError("stages is empty; give the cost of each stage, from simulation.fit_cost.")
        self.stages = tuple(stages)
        self.measured = measured
        self.frames_per_latent = frames_per_latent
        self.replicas = replicas

    def forecast(self, spec: StreamSpec, guidance: str | None = None) -> StreamChoice:
        """What a spec would give on these stages."""
        share = spec.frames_per_chunk / self.measured.frames_per_chunk
        stages = [
            # The work of a row grows with its tokens; a tick's fixed part does not.
            replace(
                own, per_row=own.per_row * share, per_start=own.per_start * share, per_finish=own.per_finish * share
            )
            for own in self._stages_for(guidance)
        ]
        found: Forecast = simulate(
            _of_one_pipeline(spec, guidance),
            stages,
            lambda tick, starts: self.schedule_micro_step(tick, spec, starts, guidance),
        )
        frames = spec.frames_per_chunk * self.frames_per_latent
        return StreamChoice(
            spec, guidance, found.chunks_per_second * frames, found.latency, found.first_chunk, found.busy
        )

    def compute_optimal_config(
        self,
        target_fps: float,
        max_latency: float | None = None,
        max_first_frame: float | None = None,
        *,
        levels: Iterable[Sequence[float]] | None = None,
        streams: Iterable[int] = (1,),
        frames_per_chunk: Iterable[int] | None = None,
        guidance: Iterable[str] = GUIDANCE,
    ) -> StreamChoice:
        """The configuration with most levels that meets both goals; among those most streams, then the lowest latency.

        Args:
            target_fps: frames per second that each stream needs.
            max_latency: seconds from a chunk's start to its end, at most.
            max_first_frame: seconds until the first frame, at most.
            levels: lists of noise levels to choose from. Default: the first 1, 2, ... of the measured spec, evenly chosen.
            streams: numbers of streams to choose from.
            frames_per_chunk: latent frames to choose from. Default: those of the measured spec.
            guidance: ways of running both branches to choose from, where there are two.

        Raises:
            ConfigError: no choice meets both; says what comes nearest.
        """
        measured = self.measured
        choices = []
        lists = (
            [fewer_levels(measured.levels, n) for n in range(1, measured.num_levels + 1)] if levels is None else levels
        )
        frames = [measured.frames_per_chunk] if frames_per_chunk is None else list(frames_per_chunk)
        wanted_ways = tuple(guidance)
        for own_levels, own_streams, own_frames in product(list(lists), list(streams), frames):
            spec = replace(
                measured,
                levels=tuple(own_levels),
                streams=own_streams,
                frames_per_chunk=own_frames,
                window=_whole_chunks(measured.window, own_frames),
                sinks=_whole_chunks(measured.sinks, own_frames),
            )
            choices += [self.forecast(spec, way) for way in self.ways_of_guidance(spec) if way in (None, *wanted_ways)]
        within = [
            own
            for own in choices
            if own.latency <= (math.inf if max_latency is None else max_latency)
            and own.first_frame <= (math.inf if max_first_frame is None else max_first_frame)
        ]
        good = [own for own in within if own.fps >= target_fps]
        if not good:
            near = max(choices, key=lambda own: (own.fps >= target_fps, min(own.fps, target_fps), -own.latency))
            wanted = f"{target_fps:g} frames/s" + (f" within {max_latency:g} s" if max_latency is not None else "")
            wanted += f" and a first frame within {max_first_frame:g} s" if max_first_frame is not None else ""
            raise ConfigError(
                f"no choice gives {wanted} with {counted(len(self.stages), 'stage')}. Nearest is {describe(near)}. "
                "Take more stages, fewer streams, smaller pictures, or other goals."
            )
        return max(good, key=lambda own: (own.spec.num_levels, own.spec.streams, -own.latency, own.fps))

    def schedule_micro_step(
        self, tick: int, spec: StreamSpec, starts: Iterable[Start], guidance: str | None = None
    ) -> list[Row]:
        """The rows that go into a pipeline at a tick; what `forecast` plays, and what a stream runs.

        Args:
            tick: number of the tick.
            spec: of the streams.
            starts: of the chunks in flight.
            guidance: how the ranks are laid out, as in `forecast`: with `"replicas"` the rows of one branch.
        """
        return rows(tick, len(self._stages_for(guidance)), _of_one_pipeline(spec, guidance), starts)

    def ways_of_guidance(self, spec: StreamSpec) -> list[str | None]:
        """How the branches of a spec can run on these ranks; None where there is one branch only."""
        if spec.branches == 1:
            return [None]
        return ["rows", "replicas"] if len(self.stages) * self.replicas % 2 == 0 else ["rows"]

    def _stages_for(self, guidance: str | None) -> list[StageCost]:
        """The stages of each pipeline, if all ranks are laid out for a way of guidance."""
        pipelines = 2 if guidance == "replicas" else 1 if guidance == "rows" else self.replicas
        stages = list(self.stages)
        if pipelines < self.replicas:
            return [part for own in stages for part in _parts(own, self.replicas // pipelines)]
        together = pipelines // self.replicas
        return [_together(stages[first : first + together]) for first in range(0, len(stages), together)]


def _of_one_pipeline(spec: StreamSpec, guidance: str | None) -> StreamSpec:
    """What each pipeline runs: with one for each branch of guidance, rows of one branch."""
    return replace(spec, guidance_scale=1.0) if guidance == "replicas" else spec


def _parts(cost: StageCost, count: int) -> list[StageCost]:
    """A stage cut into several, which encode and decode as it did."""
    parts = [StageCost(cost.fixed / count, cost.per_row / count) for _ in range(count)]
    parts[0] = replace(parts[0], per_start=cost.per_start)
    return [*parts[:-1], replace(parts[-1], per_finish=cost.per_finish)]


def _together(stages: Sequence[StageCost]) -> StageCost:
    """Several stages as one."""
    names = [own.name for own in fields(StageCost)]
    return StageCost(**{name: sum(getattr(own, name) for own in stages) for name in names})


def describe(choice: StreamChoice) -> str:
    """A choice in words."""
    spec = choice.spec
    return (
        f"{spec.num_levels} levels, {spec.streams} streams and {spec.frames_per_chunk} latent frames per chunk with "
        f"{choice.fps:.1f} frames/s and a latency of {choice.latency:.2f} s"
        + ("" if choice.guidance is None else f", branches of guidance as {choice.guidance}")
    )


def _whole_chunks(frames: int, per_chunk: int) -> int:
    return -(-frames // per_chunk) * per_chunk
