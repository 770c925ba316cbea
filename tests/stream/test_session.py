"""A pipeline as a stream: the frames are those that the whole clip's decode gives, over ranks too."""

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch

from dit_pipelining.api import ParallelConfig, load_pipeline, open_stream
from dit_pipelining.errors import ConfigError, InputError
from dit_pipelining.stream import rank as rank_module
from dit_pipelining.stream.checks import warn_of_idle_stages
from dit_pipelining.stream.head import Source, StreamInput
from dit_pipelining.stream.levels import PATIENCE
from dit_pipelining.stream.motion import MotionNoise
from dit_pipelining.stream.rebalance import Rebalancing
from dit_pipelining.stream.session import VideoStream
from dit_pipelining.stream.spec import StreamSpec
from partitioners import Partition
from tests import checkpoints
from tests.distributed import RankPool, RanksFailedError

SIZE = dict(height=64, width=64, max_sequence_length=16)
SPEC = StreamSpec(levels=(1.0, 0.6), frames_per_chunk=1, window=2, sinks=1)
CHUNKS = 5
STREAMING: dict[str, Any] = dict(timeout_seconds=60, component_ranks={"vae": "all"})
"""The first rank encodes the video, the last one decodes it."""


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("stream") / "wan", num_layers=3)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("stream") / "deep", num_layers=6)


def video() -> torch.Tensor:
    """(frames, 3, height, width)."""
    return torch.rand(4 * CHUNKS - 3, 3, 64, 64, generator=torch.Generator().manual_seed(3)) * 2 - 1


def changed(stream: VideoStream) -> Source:
    """A changed video with a new prompt in the middle."""
    other = stream.embed("a blue dog")
    for chunk, given in enumerate(stream.from_video(video(), MotionNoise())):
        assert isinstance(given, StreamInput)
        yield StreamInput(given.latents, given.noise_scale, other if chunk == 2 else None)


def streamed(folder: Path, stages: int) -> tuple[list[torch.Tensor], list[float]]:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=stages, **STREAMING))
    stream = open_stream(pipeline, SPEC, prompt="a red cat", batched=False, **SIZE)
    chunks = list(stream.run([changed(stream)]))
    assert [chunk.index for chunk in chunks] == (list(range(CHUNKS)) if stream.is_output else [])
    return [chunk.frames for chunk in chunks], [chunk.latency for chunk in chunks]


def test_a_changed_video_over_ranks_is_that_of_one_process(ranks: RankPool, wan: Path) -> None:
    alone, latencies = streamed(wan, 1)
    assert [len(frames) for frames in alone] == [1, 4, 4, 4, 4]
    assert all(0 < latency < 60 for latency in latencies)
    frames, latencies = ranks.run(2, streamed, wan, 2)[-1]
    assert all(torch.equal(one, other) for one, other in zip(frames, alone, strict=True))
    assert all(0 < latency < 60 for latency in latencies)


def decoded_apart(folder: Path) -> tuple[list[torch.Tensor], list[str]]:
    """The frames of a changed video whose VAE has a rank of its own, and the blocks of this rank."""
    config = ParallelConfig(pipeline_parallel_size=2, vae_placement="shared", **STREAMING)
    stream = open_stream(load_pipeline(folder, config), SPEC, prompt="a red cat", batched=False, **SIZE)
    frames = [chunk.frames for chunk in stream.run([changed(stream)])]
    return frames, stream.stages[0].block_names(stream.stage_index)


def test_the_vae_can_have_a_rank_of_its_own(ranks: RankPool, wan: Path) -> None:
    alone, _ = streamed(wan, 1)
    (_, blocks), (frames, nothing) = ranks.run(2, decoded_apart, wan)
    assert (len(blocks), nothing) == (3, [])
    assert all(torch.equal(one, other) for one, other in zip(frames, alone, strict=True))


def guided(folder: Path, stages: int, replicas: int, vae: int | None) -> list[torch.Tensor]:
    places = {} if vae is None else {"component_ranks": {"vae": vae}}
    config = ParallelConfig(pipeline_parallel_size=stages, cfg_parallel_size=replicas, timeout_seconds=60, **places)
    pipeline = load_pipeline(folder, config)
    spec = replace(SPEC, guidance_scale=3.0)
    stream = open_stream(pipeline, spec, prompt="a red cat", negative_prompt="the moon", batched=False, **SIZE)
    return [chunk.frames for chunk in stream.run(noise(3))]


def test_a_pipeline_for_each_branch_of_guidance_gives_the_frames_of_one_process(ranks: RankPool, wan: Path) -> None:
    alone = guided(wan, 1, 1, None)
    frames, nothing = ranks.run(2, guided, wan, 1, 2, 0)
    assert nothing == []
    assert all(torch.equal(one, other) for one, other in zip(frames, alone, strict=True))
    with pytest.raises(RanksFailedError, match="the VAE lives on rank 1, but a stream's frames are decoded on rank 0"):
        ranks.run(2, guided, wan, 1, 2, None)


def moved(folder: Path) -> tuple[list[torch.Tensor], list[int], list[int], int]:
    """Moves a block to another rank in mid-stream; also returns blocks per stage before and after, and calls of blocks."""
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2, rebalance=True, **STREAMING))
    stream = open_stream(pipeline, SPEC, prompt="a red cat", batched=False, **SIZE)
    before = list(stream.split.partition.counts)
    asked: list[Any] = []
    calls: list[str] = []

    def better(_: Rebalancing, seconds: Any) -> Partition | None:
        asked.append(seconds)
        return Partition(tuple(reversed(before))) if len(asked) == 1 else None

    def count(block: torch.nn.Module, _: Any) -> None:
        passes = getattr(block.attn1.processor, "passes", None)
        if passes is not None and passes.current is not None:  # else it is a capture
            calls.append("block")

    for block in pipeline.transformer.blocks:
        block.register_forward_pre_hook(count)
    with (
        mock.patch.object(Rebalancing, "better_partition", better),
        mock.patch.object(rank_module, "REBALANCE_TICKS", 3),
    ):
        frames = [chunk.frames for chunk in stream.run([changed(stream)])]
    assert len(asked) >= 1
    held = list(stream.caches.caches)
    after = list(stream.stages[0].split.partition.counts)
    assert held == stream.stages[0].block_names(stream.stage_index)
    return frames, before, after, len(calls)


def test_blocks_that_move_in_mid_stream_change_no_bit(ranks: RankPool, wan: Path) -> None:
    alone, _ = streamed(wan, 1)
    (_, before, after, first), (frames, _, _, second) = ranks.run(2, moved, wan)
    assert after == before[::-1] != before
    assert all(torch.equal(one, other) for one, other in zip(frames, alone, strict=True))
    assert first + second == CHUNKS * SPEC.num_levels * 3  # each row crosses each of the three blocks once


def balanced_by_itself(folder: Path) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    """A stream whose second rank is slow, and the blocks per stage each time that they are asked for."""
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2, rebalance=True, **STREAMING))
    stream = open_stream(pipeline, SPEC, prompt="a red cat", batched=False, **SIZE)
    if stream.stage_index == 1:
        for block in pipeline.transformer.blocks:
            block.register_forward_pre_hook(lambda *_: time.sleep(0.03))
    counts, frames = [stream.stages[0].split.partition.counts], []
    with mock.patch.object(rank_module, "REBALANCE_TICKS", 4):
        for chunk in stream.run(noise(12)):
            frames.append(chunk.frames)
    return frames, [*counts, stream.stages[0].split.partition.counts]


def test_a_slow_rank_gives_blocks_away_in_mid_stream(ranks: RankPool, deep: Path) -> None:
    (_, first), (frames, second) = ranks.run(2, balanced_by_itself, deep)
    assert first == second
    before, after = first
    assert after[1] < before[1]
    pipeline = diffusers.DiffusionPipeline.from_pretrained(deep)
    alone = open_stream(pipeline, SPEC, prompt="a red cat", batched=False, **SIZE).run(noise(12))
    assert all(torch.equal(one, other.frames) for one, other in zip(frames, alone, strict=True))


def adapted(folder: Path, stages: int, fps: float) -> tuple[int, tuple[float, ...]]:
    """Chunks that come out of a stream that shall reach a frame rate, and its levels at the end."""
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=stages, **STREAMING))
    stream = open_stream(pipeline, SPEC, prompt="a red cat", adaptive_fps=fps, **SIZE)
    return len(list(stream.run(noise(2 * PATIENCE)))), stream.levels


def test_a_stream_that_misses_its_deadlines_gives_up_levels_on_all_ranks(ranks: RankPool, wan: Path) -> None:
    assert ranks.run(2, adapted, wan, 2, 1e6) == [(0, SPEC.levels[:1]), (2 * PATIENCE, SPEC.levels[:1])]
    assert adapted(wan, 1, 1e-3) == (2 * PATIENCE, SPEC.levels)
    with pytest.raises(ConfigError, match="adaptive_fps=0: expected frames per second"):
        adapted(wan, 1, 0)


@pytest.mark.parametrize("prompts", [["a red cat"], ["a red cat", "a blue dog"]], ids=["one stream", "two streams"])
def test_frames_are_those_of_the_whole_clip(wan: Path, prompts: list[str]) -> None:
    pipeline, spec = diffusers.DiffusionPipeline.from_pretrained(wan), replace(SPEC, streams=len(prompts))
    found = list(open_stream(pipeline, spec, prompt=prompts, **SIZE).run_latents(noise(CHUNKS, len(prompts))))
    shown = list(open_stream(pipeline, spec, prompt=prompts, **SIZE).run(noise(CHUNKS, len(prompts))))
    for stream in range(len(prompts)):
        latents = torch.cat([chunk.latents for chunk in found if chunk.stream == stream], dim=2)
        frames = torch.cat([chunk.frames for chunk in shown if chunk.stream == stream])
        with torch.no_grad():
            clip = pipeline.vae.decode(latents).sample
        assert torch.equal(
            frames, pipeline.video_processor.postprocess_video(clip, output_type="pt")[0].permute(0, 2, 3, 1)
        )


def test_stages_that_a_policy_leaves_idle_are_spoken_of() -> None:
    with pytest.warns(UserWarning, match=r"policy='clean': .* 1 of 3 stages work .* streams=3 or more"):
        warn_of_idle_stages(replace(SPEC, policy="clean"), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_stages(replace(SPEC, policy="clean", streams=3), 3)
        warn_of_idle_stages(SPEC, 3)


def noise(chunks: int, streams: int = 1) -> list[Source]:
    return [iter([StreamInput()] * chunks) for _ in range(streams)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(height=60), "height=60: the VAE and the model's patches need a multiple of 16; use 64"),
        (dict(width=8), "width=8: .* use 16"),
        (dict(prompt=["a", "b"]), "2 prompts for 1 streams"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wan: Path, wrong: dict[str, Any], message: str) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(wan)
    with pytest.raises(InputError, match=message):
        open_stream(pipeline, SPEC, **{**dict(prompt="a"), **SIZE, **wrong})


def test_a_window_beyond_the_rotary_table_is_refused(wan: Path) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(wan)
    with pytest.raises(ConfigError, match="span 41 latent frames; the model knows distances up to 32"):
        open_stream(pipeline, StreamSpec(window=40), prompt="a", **SIZE)
