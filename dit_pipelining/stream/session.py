"""VideoStream: a diffusers pipeline as a stream of frames, in one process or over the ranks of a launch."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.capture.capturing import CaptureCache
from dit_pipelining.capture.signature import bind
from dit_pipelining.comm.cuda_streams import on_own_stream
from dit_pipelining.errors import ConfigError, InputError
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.attach import EXECUTOR, rolling_of
from dit_pipelining.runtime.owned import on_this_rank
from dit_pipelining.stream.checks import check_model, check_rate, check_span, latent_shape, warn_of_idle_stages
from dit_pipelining.stream.head import Pending, Source, StreamInput, endless
from dit_pipelining.stream.joining import join_ranks
from dit_pipelining.stream.kv_cache import DistributedKVCache
from dit_pipelining.stream.levels import AdaptiveLevels, change_levels
from dit_pipelining.stream.motion import MotionNoise
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.one_process import run_in_one_process
from dit_pipelining.stream.prompts import Prompts
from dit_pipelining.stream.rank import StreamRank
from dit_pipelining.stream.spec import FRAMES_PER_LATENT, StreamSpec
from dit_pipelining.stream.stage import StreamStage
from dit_pipelining.stream.tail import FinishedChunk
from dit_pipelining.stream.vae import StreamVAE
from dit_pipelining.stream.vae_speed import speed_up
from partitioners import Partition

MAX_TEXT_LENGTH = 512
"""Tokens that WanPipeline pads prompts to."""


@dataclass(frozen=True)
class VideoChunk:
    """Frames of a stream.

    Attributes:
        stream: which video.
        index: number of the chunk in its stream.
        frames: (frames, height, width, 3) in [0, 1], on the device that decoded them.
        latency: seconds since the source gave the chunk; where source and decoder are on different hosts, as far as their
            clocks agree.
    """

    stream: int
    index: int
    frames: torch.Tensor
    latency: float


class VideoStream:
    """Streams of one pipeline. Every rank makes one, and iterates over `run` to the end.

    Args:
        pipeline: a Wan pipeline from `load_pipeline` or `parallelize`, or a plain one.
        spec: of the streams.
        height, width: of the frames in pixels.
        prompt: of all streams, or one for each.
        negative_prompt: for guidance.
        seed: of the noise.
        batched: rows of a tick in one batch; False: one after the other, for the bits of the sequential reference.
        max_sequence_length: tokens that prompts are padded to.
        adaptive_fps: give up noise levels of the spec while the stream cannot keep this frame rate, and take them back when
            it can (levels.py). None: the levels stay.

    Attributes:
        is_input: whether this rank looks at the sources: that of the first stage.
        is_output: whether this rank yields the frames: that of the last stage.

    Raises:
        InputError, ConfigError: the pipeline cannot stream, or the sizes do not fit it; says why.
    """

    def __init__(
        self,
        pipeline: Any,
        spec: StreamSpec,
        *,
        height: int,
        width: int,
        prompt: str | Sequence[str],
        negative_prompt: str | None = None,
        seed: int = 0,
        batched: bool = True,
        max_sequence_length: int = MAX_TEXT_LENGTH,
        adaptive_fps: float | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.spec = spec
        self.rolling = rolling_of(pipeline)
        if self.rolling is not None and self.rolling.mesh.size < dist.get_world_size():
            raise ConfigError(
                f"a stream runs on pipeline_parallel_size x cfg_parallel_size={self.rolling.mesh.size} ranks, but "
                f"{dist.get_world_size()} were launched: leave the other sizes at 1."
            )
        if adaptive_fps is not None:
            check_rate(adaptive_fps)
        self.adaptive_fps = adaptive_fps
        self._text_length = max_sequence_length
        self._is_running = False
        model = pipeline.transformer
        prompts = [prompt] * spec.streams if isinstance(prompt, str) else list(prompt)
        if len(prompts) != spec.streams:
            raise InputError(f"{len(prompts)} prompts for {spec.streams} streams; give one, or one per stream.")
        check_model(model)
        self.shape = latent_shape(pipeline, spec, height, width)
        check_span(model, spec)
        self.device = self.rolling.device if self.rolling is not None else model.device
        embedded = [self.embed(own) for own in prompts]
        self.split = self._split(embedded[0])
        self.num_stages = num_stages = self.split.num_stages
        self.stage_index = 0
        negative = self.embed(negative_prompt or "") if spec.branches > 1 else None
        has_twin = self.rolling is not None and self.rolling.mesh.replicas > 1
        own_spec = replace(spec, guidance_scale=1.0) if has_twin else spec
        if has_twin and self.rolling is not None and self.rolling.mesh.replica == 1 and negative is not None:
            embedded, negative = [negative] * spec.streams, None
        known = Prompts(embedded, negative, in_flight=spec.passes * num_stages)
        self.caches = DistributedKVCache(own_spec)
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        self.noise = NoiseSource(seed, self.shape, dtype, self.device)
        if self.rolling is not None:
            self.stage_index = self.rolling.mesh.stage
        own_stages = [self.stage_index] if self.rolling is not None else range(num_stages)
        self.stages = [
            StreamStage(self.split, index, own_spec, self.shape, known, self.caches, self.device, batched)
            for index in own_stages
        ]
        is_first = self.rolling is None or self.rolling.mesh.replica == 0
        self.is_input = is_first and self.stage_index == 0
        if self.is_input:  # once for all ranks
            warn_of_idle_stages(spec, num_stages)
        self.is_output = is_first and (self.stage_index == num_stages - 1 or self.rolling is None)
        self._rank: StreamRank | None = None
        if self.rolling is not None and self.rolling.mesh.size > 1:
            self._rank = join_ranks(pipeline, self.rolling, spec, self.stages[0], self.noise)
            self.rolling.guard.on_beat(self._check_overdue)
        self._decoders = [StreamVAE(pipeline.vae) for _ in range(spec.streams)] if self.is_output else []
        if self.device.type == "cuda" and any(stage.module.compiled for stage in self.stages):
            speed_up(pipeline.vae)

    @torch.no_grad()
    def embed(self, prompt: str) -> torch.Tensor:
        """A prompt's embedding, for `StreamInput.prompt`, (1, tokens, channels).

        Every rank calls this; a source, which only the first rank runs, may call it too.
        """
        # While the stream runs this is code of a source.
        alone = self.pipeline.components.values() if self._is_running else ()
        with on_this_rank(alone):
            embedded = self.pipeline.encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=self._text_length, device=self.device
            )[0]
        found: torch.Tensor = embedded.to(self.device, self.pipeline.transformer.dtype).clone()
        return found

    def from_video(
        self,
        frames: Iterable[torch.Tensor | Pending],
        motion: MotionNoise | None = None,
        noise_scale: float | None = None,
    ) -> Source:
        """A source of chunks that change a video; on the first rank, which needs the VAE: `component_ranks={"vae": "all"}`.

        Args:
            frames: one by one, (3, height, width) in [-1, 1]; a live source gives `PENDING` while it has none. What is left
                at the end and fills no chunk is dropped.
            motion: chooses the noise of each chunk by what moves in it.
            noise_scale: the noise of all chunks, without `motion`; default: the spec's first level.
        """
        encoder = StreamVAE(self.pipeline.vae)
        waiting: list[torch.Tensor] = []
        for frame in frames:
            if isinstance(frame, Pending):
                yield frame
                continue
            waiting.append(frame)
            if len(waiting) < encoder.frames_of(self.spec.frames_per_chunk):
                continue
            chunk = torch.stack(waiting, dim=1)[None]
            waiting = []
            scale = motion(chunk) if motion is not None else noise_scale
            latents = encoder.encode_chunk(chunk.to(self.device, self.pipeline.vae.dtype))
            yield StreamInput(encoder.normalise(latents.to(self.noise.dtype)), noise_scale=scale)

    def run(self, sources: Sequence[Source] | None = None) -> Iterator[VideoChunk]:
        """Frames, as soon as they are decoded; ends when the sources have ended and everything has come out.

        Args:
            sources: what each stream is made of; those of the first rank count. Default: noise without end.

        Yields:
            on the output rank every chunk, those of a stream in order; on the others nothing.
        """
        for chunk in self.run_latents(sources):
            yield self.decode(chunk)

    @torch.no_grad()
    def run_latents(self, sources: Sequence[Source] | None = None) -> Iterator[FinishedChunk]:
        """As `run`, but latents, for a decoder of one's own."""
        given = [endless() for _ in range(self.spec.streams)] if sources is None else sources
        levels = None
        if self.adaptive_fps is not None:
            change_levels(self.stages, self.spec.levels)  # an earlier run may have ended with fewer
            levels = AdaptiveLevels(
                self.spec.levels, FRAMES_PER_LATENT * self.spec.frames_per_chunk / self.adaptive_fps
            )
        if self._rank is None:
            yield from run_in_one_process(self.stages, given, self.noise, levels)
            return
        assert self.rolling is not None
        with self.rolling.guard.call():
            self._is_running = True
            try:
                yield from on_own_stream(self._rank.run(given, levels), self.device)
            finally:
                self._is_running = False

    @property
    def is_distributed(self) -> bool:
        """Whether the stages are on several ranks."""
        return self._rank is not None

    @property
    def levels(self) -> tuple[float, ...]:
        """The noise levels that chunks pass now, on this rank."""
        return self.stages[0].spec.levels

    @property
    def num_pipelines(self) -> int:
        """Two where each branch of guidance has one."""
        return self.rolling.mesh.replicas if self.rolling is not None else 1

    @property
    def control(self) -> dist.ProcessGroup:
        """A gloo group of all ranks."""
        assert self._rank is not None
        return self._rank.links.control

    def stage_seconds(self) -> list[tuple[int, float]]:
        """Rows and seconds of the last micro-steps of this rank's stage."""
        return [sample for stage in self.stages for sample in stage.seconds()]

    def loads(self) -> list[float]:
        """The share of the time that each stage works, on the output rank."""
        if self._rank is not None:
            return [float(load) for load in self._rank.noted[:, 0]]
        return [stage.load() for stage in self.stages]

    def decode(self, chunk: FinishedChunk) -> VideoChunk:
        """The frames of a chunk; on the output rank, every chunk of a stream in order."""
        decoder = self._decoders[chunk.stream]
        if chunk.facts.first:
            decoder.reset()
        frames = decoder.decode_chunk(decoder.denormalise(chunk.latents))[0]
        shown = (frames.permute(1, 2, 3, 0).float() / 2 + 0.5).clamp(0, 1)
        return VideoChunk(chunk.stream, chunk.index, shown, time.time() - chunk.facts.started)

    def _check_overdue(self) -> str | None:
        spent = max(stage.seconds_unfinished() for stage in self.stages)
        limit = self.pipeline.transformer.__dict__[EXECUTOR].config.timeout_seconds
        if spent < limit:
            return None
        return f"has had a micro-step of a stream in flight for {spent:.0f} s (ParallelConfig.timeout_seconds)."

    def _split(self, text: torch.Tensor) -> SplitModel:
        model = self.pipeline.transformer
        example = {
            "hidden_states": torch.zeros(self.shape, dtype=model.dtype, device=self.device),
            "timestep": torch.zeros(1, device=self.device),
            "encoder_hidden_states": text,
            "return_dict": False,
        }
        executor = model.__dict__.get(EXECUTOR)
        if executor is not None:
            found: SplitModel = executor.split_for(example)
            return found
        captures = CaptureCache(model)
        graph = captures.get(bind(model.forward, (), example))
        return SplitModel(model, captures, graph, Partition((len(graph.blocks),)))
