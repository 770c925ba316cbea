"""A stream over ranks equals the sequential reference on the unsplit diffusers model, bit for bit."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dit_pipelining.stream.head import PENDING, StreamInput
from dit_pipelining.stream.spec import StreamSpec
from tests.distributed import RankPool
from tests.stream import harness, peer_memory, reference

CHUNKS = 6
PROMPTS = {0: 10, 3: 20}
SCALES = [1.0, 0.9, 0.7, 0.95, 1.0, 0.5]


def spec(**more: Any) -> StreamSpec:
    return StreamSpec(**{**dict(levels=(1.0, 0.7, 0.4), frames_per_chunk=2, window=2, sinks=2), **more})


def source(own: StreamSpec, stream: int) -> Any:
    """A changed video, with a new prompt in the middle and a source that is late at times."""
    for chunk, latents in enumerate(reference.video(CHUNKS, seed=stream)):
        if chunk % 2:
            yield PENDING
        prompt = reference.text(PROMPTS[chunk]) if chunk in PROMPTS and chunk else None
        yield StreamInput(latents, SCALES[chunk], prompt)


def streamed(own: StreamSpec, counts: tuple[int, ...], folder: Path | None) -> list[tuple[int, int, torch.Tensor]]:
    """What a rank gives; its tensors take gloo, or with a folder peer copies."""
    prompts = [reference.text(10)] * own.streams
    with nullcontext() if folder is None else peer_memory.played(folder):
        rank = harness.rank(reference.model(), own, counts, prompts, "host" if folder is None else "peer")
        finished = list(rank.run([source(own, stream) for stream in range(own.streams)]))
    assert (len(finished) == 0) == (dist.get_rank() != len(counts) - 1)
    return [(chunk.stream, chunk.index, chunk.latents) for chunk in finished]


@pytest.mark.parametrize(
    ("own", "counts", "pipelines", "transport"),
    [
        (spec(), (3, 1), 1, "host"),
        (spec(streams=2, guidance_scale=2.0), (1, 2, 1), 1, "host"),
        (spec(policy="clean", streams=3), (2, 1, 1), 1, "host"),
        (spec(guidance_scale=2.0), (3, 1), 2, "host"),
        (spec(streams=2, guidance_scale=2.0), (4,), 2, "host"),
        (spec(streams=2), (1, 2, 1), 1, "peer"),
        (spec(guidance_scale=2.0), (3, 1), 2, "peer"),
    ],
)
def test_a_stream_over_ranks_is_the_reference(
    ranks: RankPool, tmp_path: Path, own: StreamSpec, counts: tuple[int, ...], pipelines: int, transport: str
) -> None:
    folder = tmp_path if transport == "peer" else None
    finished = ranks.run(pipelines * len(counts), streamed, own, counts, folder)[len(counts) - 1]
    known = reference.Reference(reference.model(), own)
    prompts = {chunk: reference.text(seed) for chunk, seed in PROMPTS.items()}
    for stream in range(own.streams):
        expected = known.run(stream, CHUNKS, prompts, reference.text(99), reference.video(CHUNKS, seed=stream), SCALES)
        own_chunks = [(index, latents) for number, index, latents in finished if number == stream]
        assert [index for index, _ in own_chunks] == list(range(CHUNKS))
        assert all(torch.equal(one, other) for (_, one), other in zip(own_chunks, expected, strict=True))


def ahead_of_a_slow_end(folder: Path, chunks: int) -> list[int]:
    """How many chunks the source has given when each comes out, on a last rank that is slow to use it."""
    given = folder / "given"
    rank = harness.rank(reference.model(layers=2), spec(levels=(1.0,)), (1, 1), [reference.text(10)])

    def counted() -> Any:
        for chunk in range(chunks):
            given.with_suffix(".new").write_text(str(chunk + 1))
            given.with_suffix(".new").replace(given)  # whoever reads it sees all of it
            yield StreamInput()

    ahead = []
    for chunk in rank.run([counted()]):
        time.sleep(0.03)
        ahead.append(int(given.read_text()) - chunk.index)
    return ahead


def test_a_source_does_not_run_away_from_a_slow_end(ranks: RankPool, tmp_path: Path) -> None:
    ahead = ranks.run(2, ahead_of_a_slow_end, tmp_path, 24)[-1]
    assert len(ahead) == 24
    assert max(ahead) <= 2 + 3  # in both stages, in between, and the one that waits to start
