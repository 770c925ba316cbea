"""Measure what a stream costs here, and choose its levels by that."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from dit_pipelining.stream.batch_scheduler import StreamBatchScheduler, StreamChoice
from dit_pipelining.stream.head import Source, StreamInput
from dit_pipelining.stream.session import VideoStream
from dit_pipelining.stream.simulation import StageCost, fit_cost
from dit_pipelining.stream.vae import StreamVAE

MEASURED_CHUNKS = 6
"""Chunks in a steady flow; those that fill and empty the pipeline measure smaller numbers of rows."""

ENCODED_CHUNKS = 3
"""Chunks whose encoding is timed, after the first one."""

WORTH = 1.05
"""How much faster another layout of the ranks must be expected to be to be spoken of."""


def measure(stream: VideoStream, encodes: bool = False) -> list[StageCost]:
    """Run a few chunks of noise through a stream; every rank calls this, and gets the costs of all stages.

    The first chunks load kernels and fill caches, so they run twice.

    Args:
        stream: to be measured.
        encodes: also time the VAE's encoder on the rank that looks at the sources, for streams that change a video.
    """
    decoding = 0.0
    for _ in range(2):
        decoding = _run(stream)
    encoding = _seconds_to_encode(stream) if encodes and stream.is_input else 0.0
    if not stream.is_distributed:
        costs = [fit_cost(stage.seconds()) for stage in stream.stages]
        costs[0] = replace(costs[0], per_start=encoding)
        return [*costs[:-1], replace(costs[-1], per_finish=decoding)]
    own = replace(fit_cost(stream.stage_seconds()), per_start=encoding, per_finish=decoding)
    costs = [own] * dist.get_world_size(stream.control)
    dist.all_gather_object(costs, own, group=stream.control)
    return costs[: stream.num_stages]


def tune(
    stream: VideoStream,
    target_fps: float,
    max_latency: float | None = None,
    max_first_frame: float | None = None,
    streams: Iterable[int] = (),
    frames_per_chunk: Iterable[int] = (),
    encodes: bool = False,
) -> StreamChoice:
    """The configuration for these goals on these stages; every rank calls this and gets the same.

    Args:
        stream: with the most levels to choose from.
        target_fps: frames per second that each stream needs.
        max_latency: seconds from a chunk's start to its end, at most.
        max_first_frame: seconds until the first frame, at most.
        streams: numbers of streams to choose from; default: that of `stream`.
        frames_per_chunk: latent frames of a chunk to choose from; default: those of `stream`.
        encodes: whether the streams change a video, which has to be encoded.

    Raises:
        ConfigError: no choice meets both.
    """
    scheduler = StreamBatchScheduler(measure(stream, encodes), stream.spec, replicas=stream.num_pipelines)
    own = "replicas" if stream.num_pipelines > 1 else "rows"
    choice = scheduler.compute_optimal_config(
        target_fps,
        max_latency,
        max_first_frame,
        streams=tuple(streams) or (stream.spec.streams,),
        frames_per_chunk=tuple(frames_per_chunk) or None,
        guidance=(own,),
    )
    ways = [scheduler.forecast(choice.spec, way) for way in scheduler.ways_of_guidance(choice.spec)]
    return replace(choice, faster_guidance=_faster(choice, ways))


def _faster(choice: StreamChoice, ways: Sequence[StreamChoice]) -> str | None:
    best = max(ways, key=lambda way: way.fps)
    return best.guidance if best.fps > WORTH * choice.fps else None


def _run(stream: VideoStream) -> float:
    """Seconds that decoding a chunk takes on the output rank; 0 on the others."""
    chunks = stream.spec.passes + MEASURED_CHUNKS
    sources: list[Source] = [iter([StreamInput()] * chunks) for _ in range(stream.spec.streams)]
    spent = []
    for chunk in stream.run_latents(sources):
        _wait(stream.device)
        began = time.perf_counter()
        stream.decode(chunk)
        _wait(stream.device)
        spent.append(time.perf_counter() - began)
    return sorted(spent)[len(spent) // 2] if spent else 0.0


@torch.no_grad()
def _seconds_to_encode(stream: VideoStream) -> float:
    """Seconds that encoding a chunk takes; the first one, which is shorter, does not count."""
    encoder = StreamVAE(stream.pipeline.vae)
    factor, vae = stream.pipeline.vae_scale_factor_spatial, stream.pipeline.vae
    height, width = (factor * size for size in stream.shape[-2:])
    spent = []
    for _ in range(1 + ENCODED_CHUNKS):
        count = encoder.frames_of(stream.spec.frames_per_chunk)
        frames = torch.zeros(1, 3, count, height, width, dtype=vae.dtype, device=stream.device)
        _wait(stream.device)
        began = time.perf_counter()
        encoder.encode_chunk(frames)
        _wait(stream.device)
        spent.append(time.perf_counter() - began)
    return sorted(spent[1:])[ENCODED_CHUNKS // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
