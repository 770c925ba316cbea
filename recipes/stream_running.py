"""Runs the stream that the flags of `stream_video.py` ask for."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from common import load_with, parallel_config, report
from diffusers import WanTransformer3DModel
from stream_display import StreamDisplay
from stream_files import FrameWriter, camera_frames, video_frames

from dit_pipelining.api import StreamSpec, VideoStream, open_stream
from dit_pipelining.stream.batch_scheduler import describe
from dit_pipelining.stream.consumer import Consumer
from dit_pipelining.stream.goals import StreamGoals
from dit_pipelining.stream.head import Pending, Source, StreamInput
from dit_pipelining.stream.metrics import StreamMetrics
from dit_pipelining.stream.motion import MotionNoise
from dit_pipelining.stream.spec import FRAMES_PER_LATENT
from dit_pipelining.stream.tuning import tune

LAYOUTS = {
    "rows": "faster on these ranks: one pipeline for both branches of guidance, without --cfg-parallel-size",
    "replicas": "faster on these ranks: a pipeline for each branch of guidance, with --cfg-parallel-size 2",
}


def run_stream(
    args: argparse.Namespace, spec: StreamSpec, goals: StreamGoals, changes: dict[int, str], size: dict[str, Any]
) -> None:
    """Load the pipeline, choose the levels where that is asked for, and stream.

    Args:
        args: the flags.
        spec: of the stream, as the flags have it.
        goals: that choose the levels, and that are told when they are missed.
        changes: other prompts, by the chunk from which on they hold.
        size: height, width, prompts and seed of the stream.
    """
    parts = {"transformer": WanTransformer3DModel.from_pretrained(args.transformer)} if args.transformer else {}
    # The first rank encodes a video, the last one decodes the result.
    more = {"component_ranks": {"vae": "all"}} if changes_video(args) else {}
    config = parallel_config(args, more)
    if config.cfg_parallel_size > 1 and config.component_ranks is None:  # the frames come from the first pipeline
        config = replace(config, component_ranks={"vae": config.pipeline_parallel_size - 1})
    pipeline = load_with(args, config, **parts)
    stream = open_stream(pipeline, spec, **size)
    if goals.adaptive_steps or args.target_fps is not None:
        first = None if goals.max_ttff_ms is None else goals.max_ttff_ms / 1e3
        choice = tune(
            stream,
            goals.target_fps or 0.0,
            args.max_latency,
            first,
            frames_per_chunk=args.frames_per_chunk,
            encodes=changes_video(args),
        )
        if stream.is_output:
            print(f"chosen: {describe(choice)} expected")
            if choice.faster_guidance is not None:
                print(LAYOUTS[choice.faster_guidance])
        adaptive = goals.target_fps if goals.adaptive_steps else None
        spec = choice.spec
        stream = open_stream(pipeline, spec, **size, adaptive_fps=adaptive)
    embedded = {chunk: stream.embed(prompt) for chunk, prompt in changes.items()}
    source = with_prompts(limited(source_of(args, stream), chunks_of(args, spec)), embedded)
    if stream.is_output:
        report(pipeline)
        show(stream, source, args, goals)
    else:
        for _ in stream.run([source]):
            pass


def changes_video(args: argparse.Namespace) -> bool:
    """Whether frames are given, which have to be encoded."""
    return args.video is not None or args.camera is not None


def source_of(args: argparse.Namespace, stream: VideoStream) -> Source:
    if not changes_video(args):
        return iter(lambda: StreamInput(noise_scale=args.noise_scale), None)
    frames = (
        camera_frames(args.camera, args.height, args.width)
        if args.camera
        else video_frames(args.video, args.height, args.width)
    )
    return stream.from_video(frames, MotionNoise() if args.motion else None, args.noise_scale)


def chunks_of(args: argparse.Namespace, spec: StreamSpec) -> int | None:
    """How many chunks give the number of frames asked for; the first latent stands for one frame."""
    frames = args.num_frames
    if frames is None:
        if changes_video(args):
            return None
        frames = 81
    latents = 1 + -(-(frames - 1) // FRAMES_PER_LATENT)
    return -(-latents // spec.frames_per_chunk)


def limited(source: Source, chunks: int | None) -> Source:
    """The first chunks of a source."""
    given = 0
    while chunks is None or given < chunks:
        try:
            own = next(source)
        except StopIteration:
            return
        given += not isinstance(own, Pending)
        yield own


def with_prompts(source: Source, changes: dict[int, torch.Tensor]) -> Source:
    """The source with other prompts from some chunks on."""
    chunk = 0
    for own in source:
        if isinstance(own, Pending):
            yield own
            continue
        yield StreamInput(own.latents, own.noise_scale, changes.get(chunk), own.first)
        chunk += 1


def show(stream: VideoStream, source: Source, args: argparse.Namespace, goals: StreamGoals) -> None:
    """On the output rank: write what comes, and show how it goes."""
    writer = FrameWriter(args.output, args.fps)
    consumer = Consumer(writer.write, args.queue, args.drop)
    metrics = StreamMetrics(args.fps)
    with StreamDisplay() as display:
        for chunk in watched(stream, source, metrics):
            consumer.put(chunk)
            display.update(metrics.read(), stream.loads(), consumer.dropped, len(stream.levels))
    consumer.close()
    writer.close()
    print()  # where there is no terminal, the display leaves its last line open
    for missed in goals.missed(metrics.read()):
        print(missed)
    print(f"video: {args.output}")


def watched(stream: VideoStream, source: Source, metrics: StreamMetrics) -> Iterator[Any]:
    """The frames of each chunk on the CPU, counted."""
    for chunk in stream.run([source]):
        frames = (chunk.frames * 255).round().to(torch.uint8).cpu().numpy()
        metrics.add(len(frames), chunk.latency)
        yield frames
