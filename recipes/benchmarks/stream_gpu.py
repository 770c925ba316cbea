"""Streams of a Wan with random weights on one GPU, or on several under torchrun."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from random_models import random_transformer
from stream_stages import split_of, stages_of

from dit_pipelining.api import SplitModel, StreamSpec
from dit_pipelining.planning.presets import preset
from dit_pipelining.stream.attention import make_plain
from dit_pipelining.stream.batch_scheduler import StreamBatchScheduler
from dit_pipelining.stream.head import Source, StreamInput
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.one_process import run_in_one_process
from dit_pipelining.stream.simulation import StageCost, fit_cost
from dit_pipelining.stream.spec import FRAMES_PER_LATENT
from dit_pipelining.stream.stage import StreamStage
from dit_pipelining.stream.tail import FinishedChunk
from dit_pipelining.stream.vae import StreamVAE
from dit_pipelining.stream.vae_speed import speed_up

LEVELS = (1.0, 0.9375, 0.8333, 0.625)
CONTEXT = dict(window=2, sinks=3)
MODES = ("none", "blocks", "blocks-cudagraphs")
SIZES = {"480p": (480, 832), "512x512": (512, 512)}

Play = Callable[[StreamSpec, Source], Iterator[FinishedChunk]]
"""Runs a stream of this spec from its beginning; yields finished chunks, on the rank of the last stage."""


@dataclass(frozen=True)
class Model:
    """A preset, and frames per second with 1, 2, 3 and 4 levels as the authors of StreamDiffusionV2 report them."""

    preset: str
    published: dict[str, tuple[float, ...]]


MODELS = {
    "1.3b": Model("wan2.1-t2v-1.3b", {"480p": (20.47, 17.97, 15.68, 13.95), "512x512": (26.21, 24.02, 21.51, 19.43)}),
    "14b": Model("wan2.1-t2v-14b", {"480p": (12.68, 8.64, 6.49, 5.28)}),
}


@dataclass(frozen=True)
class Workload:
    """What is measured: a model, sizes, numbers of levels, chunks that are timed, a way to compile."""

    model: str
    sizes: tuple[str, ...]
    levels: tuple[int, ...]
    chunks: int
    mode: str


@dataclass(frozen=True)
class Picture:
    """One size: the latents of a chunk, frames of a random video with the one before the first, a random prompt."""

    shape: tuple[int, ...]
    frames: torch.Tensor
    text: torch.Tensor


def prepared(workload: Workload, device: torch.device) -> tuple[Any, AutoencoderKLWan]:
    """The transformer and the VAE."""
    model: Any = random_transformer(preset(MODELS[workload.model].preset), device).eval()
    vae = AutoencoderKLWan().to(device, torch.bfloat16).eval()
    if workload.mode != "none":
        speed_up(vae)
    return model, vae


def picture(size: str, device: torch.device, dtype: torch.dtype) -> Picture:
    height, width = SIZES[size]
    random = torch.Generator(device).manual_seed(2)
    frames = torch.rand(1, 3, 1 + FRAMES_PER_LATENT, height, width, device=device, generator=random).bfloat16()
    text = torch.randn(1, 512, 4096, device=device, generator=random).to(dtype)
    return Picture((1, 16, 1, height // 8, width // 8), 2 * frames - 1, text)


class OneGpu:
    """Plays streams through a split with one stage."""

    def __init__(self, split: SplitModel, own: Picture) -> None:
        self.split = split
        self.own = own
        self.stages: list[StreamStage] = []

    def __call__(self, spec: StreamSpec, source: Source) -> Iterator[FinishedChunk]:
        self.stages = []  # its keys and values make room
        self.stages = stages_of(self.split, spec, self.own.shape, self.own.text, [0], StreamStage)
        noise = NoiseSource(0, self.own.shape, torch.float32, self.own.frames.device)
        return run_in_one_process(self.stages, [source], noise)

    def seconds_per_tick(self, rows: int) -> float:
        """Of the ticks with so many rows."""
        return statistics.median(seconds for count, seconds in self.stages[0].seconds() if count == rows)


@torch.no_grad()
def on_one_gpu(workload: Workload, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each size and number of levels, and one for each size with costs and predictions."""
    model, vae = prepared(workload, device)
    for size in workload.sizes:
        own = picture(size, device, model.dtype)
        vae_seconds = seconds_of_vae(vae, own)
        split = split_of(model, own.shape, own.text, [len(model.blocks)])
        if workload.mode != "none":
            split.compile(workload.mode)
        facts = {"model": workload.model, "size": size, "compile": workload.mode, "gpus": 1}
        samples: list[tuple[int, float]] = []
        line = OneGpu(split, own)
        for count in workload.levels:
            spec = StreamSpec(levels=LEVELS[:count], **CONTEXT)
            began = time.perf_counter()
            row = measured(line, spec, 1, vae, own, workload.chunks)
            samples.append((count, line.seconds_per_tick(count)))
            first = first_frame(line, spec, 1, vae, own)
            spent = time.perf_counter() - began
            yield {
                **facts,
                "levels": count,
                **row,
                "first_frame": first,
                "tick_ms": 1e3 * samples[-1][1],
                "took": spent,
            }
        make_plain(model.blocks)
        cost = fit_cost(samples)
        yield {
            **facts,
            "vae_ms": {name: 1e3 * seconds for name, seconds in vae_seconds.items()},
            "a_ms": 1e3 * cost.fixed,
            "b_ms": 1e3 * cost.per_row,
            "samples": samples,
            "memory_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "predicted": predicted(cost, vae_seconds, workload.levels),
        }


def measured(play: Play, spec: StreamSpec, num_stages: int, vae: Any, own: Picture, chunks: int) -> dict[str, Any]:
    """Frames per second of one stream that begins as noise alone, is then decoded, and then changes a video.

    Events on the GPU tell when each chunk was there, so the host may run ahead.
    """
    lead = spec.num_levels * num_stages  # how many chunks have started when one ends
    alone = range(
        lead + spec.window_chunks + spec.sink_chunks + 2, lead + spec.window_chunks + spec.sink_chunks + 2 + chunks
    )
    decoded = range(alone.stop + 2, alone.stop + 2 + chunks)  # the VAE's first two chunks are shorter
    first_encoded = decoded.stop + lead
    changed = range(first_encoded + 2, first_encoded + 2 + chunks)
    coder, decoder = StreamVAE(vae), StreamVAE(vae)
    ends: list[torch.cuda.Event] = []
    started: list[float] = []
    coder.encode_chunk(own.frames[:, :, :1])
    torch.cuda.synchronize()
    base, clock = _event(), time.time()

    def source() -> Source:
        for chunk in range(changed.stop):
            yield StreamInput() if chunk < first_encoded else _encoded(coder, own.frames[:, :, 1:])

    for chunk in play(spec, source()):
        if chunk.index >= alone.stop:
            decoder.decode_chunk(decoder.denormalise(chunk.latents))
        ends.append(_event())
        started.append(chunk.facts.started)
    torch.cuda.synchronize()
    times = [base.elapsed_time(end) / 1e3 for end in ends]
    found: dict[str, Any] = {}
    for name, part in (("alone", alone), ("decoded", decoded), ("video_to_video", changed)):
        if times:
            seconds = times[part.stop - 1] - times[part.start]
            latencies = [clock + times[chunk] - started[chunk] for chunk in part]
            found[name] = {
                "fps": FRAMES_PER_LATENT * (len(part) - 1) / seconds,
                "latency": statistics.median(latencies),
            }
    return found


def first_frame(play: Play, spec: StreamSpec, num_stages: int, vae: Any, own: Picture) -> float | None:
    """Seconds from the first frame of a video to its changed frame, all kernels loaded; on the last rank."""
    coder, decoder = StreamVAE(vae), StreamVAE(vae)
    chunks = spec.num_levels * num_stages + 1
    torch.cuda.synchronize()
    found = None

    def source() -> Source:
        for chunk in range(chunks):
            yield _encoded(coder, own.frames[:, :, 1:] if chunk else own.frames[:, :, :1])

    for chunk in play(spec, source()):
        if found is None:
            decoder.decode_chunk(decoder.denormalise(chunk.latents))
            torch.cuda.synchronize()
            found = time.time() - chunk.facts.started
    return found


def seconds_of_vae(vae: Any, own: Picture) -> dict[str, float]:
    """Seconds of a chunk, alone on the GPU."""
    stream = StreamVAE(vae)
    latents = torch.randn(own.shape, device=vae.device, dtype=vae.dtype)
    stream.encode_chunk(own.frames[:, :, :1])
    times: dict[str, list[float]] = {"decode": [], "encode": []}
    for _ in range(8):
        for name, seconds in times.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            if name == "decode":
                stream.decode_chunk(latents)
            else:
                stream.encode_chunk(own.frames[:, :, 1:])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    return {name: statistics.median(seconds[3:]) for name, seconds in times.items()}


def predicted(cost: StageCost, vae: dict[str, float], levels: Sequence[int]) -> dict[str, Any]:
    """Video to video on 2 and 4 GPUs by simulation: the first encodes, the last decodes, blocks fill up the others."""
    found = {}
    for gpus in (2, 4):
        for count in levels:
            spec = StreamSpec(levels=LEVELS[:count], **CONTEXT)
            total = cost.fixed + cost.per_row * count
            shares = [seconds / total for seconds in filled(total, [vae["encode"], *[0.0] * (gpus - 2), vae["decode"]])]
            stages = [StageCost(cost.fixed * share, cost.per_row * share) for share in shares]
            stages[0] = replace(stages[0], per_start=vae["encode"])
            stages[-1] = replace(stages[-1], per_finish=vae["decode"])
            choice = StreamBatchScheduler(stages, spec).forecast(spec)
            found[f"{gpus} GPUs, {count} levels"] = {"fps": choice.fps, "latency": choice.latency}
    return found


def filled(total: float, busy: Sequence[float]) -> list[float]:
    """How to spread work over ranks that are busy with something else, so that the busiest is least busy."""
    order = sorted(range(len(busy)), key=lambda rank: busy[rank])
    for used in range(len(busy), 0, -1):
        chosen = order[:used]
        level = (total + sum(busy[rank] for rank in chosen)) / used
        if level >= busy[chosen[-1]]:
            return [level - busy[rank] if rank in chosen else 0.0 for rank in range(len(busy))]
    raise AssertionError("the least busy rank alone can take everything")


def table(found: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The rows with frame rates, for people."""
    rows = []
    for own in (row for row in found if "decoded" in row):
        published = MODELS[own["model"]].published[own["size"]][own["levels"] - 1]
        row = {
            "model": f"{own['model']} {own['size']} {own['compile']}",
            "GPUs, levels": f"{own['gpus']}, {own['levels']}",
        }
        for name in ("alone", "decoded", "video_to_video"):
            row[f"{name.replace('_', ' ')}: fps, latency ms"] = (
                f"{own[name]['fps']:.2f}, {1e3 * own[name]['latency']:.0f}"
            )
        rows.append({**row, "first frame ms": f"{1e3 * own['first_frame']:.0f}", "published fps": f"{published:.2f}"})
    return rows


def _encoded(coder: StreamVAE, frames: torch.Tensor) -> StreamInput:
    return StreamInput(coder.normalise(coder.encode_chunk(frames).float()), noise_scale=0.9)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
