"""A stream through stages equals the sequential reference on the unsplit diffusers model."""

import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from dit_pipelining.errors import InputError
from dit_pipelining.stream import passes
from dit_pipelining.stream.cache import Place, Pointer, place_of
from dit_pipelining.stream.head import PENDING, Pending, StreamInput, endless
from dit_pipelining.stream.one_process import run_in_one_process
from dit_pipelining.stream.spec import StreamSpec
from tests.stream import harness, reference

LEVELS = (1.0, 0.8, 0.55, 0.3)
CHUNKS = 7
Streams = list[list[torch.Tensor]]


def spec(num_levels: int = 2, **more: Any) -> StreamSpec:
    return StreamSpec(**{**dict(levels=LEVELS[:num_levels], frames_per_chunk=2, window=4, sinks=2), **more})


@functools.cache
def expected(own: StreamSpec, chunks: int = CHUNKS, dtype: torch.dtype = torch.float32) -> Streams:
    known = reference.Reference(reference.model(dtype), own)
    negative = reference.text(99, dtype)
    return [known.run(s, chunks, {0: reference.text(10 + s, dtype)}, negative) for s in range(own.streams)]


def streamed(
    own: StreamSpec,
    counts: tuple[int, ...] = (1, 3),
    batched: bool = False,
    chunks: int = CHUNKS,
    dtype: torch.dtype = torch.float32,
) -> Streams:
    made = harness.stages(reference.model(dtype), own, counts, batched)
    return harness.run(made, [[StreamInput()] * chunks] * own.streams)[0]


def same(one: Streams, other: Streams) -> bool:
    assert [len(own) for own in one] == [len(own) for own in other]
    return all(torch.equal(a, b) for s, t in zip(one, other, strict=True) for a, b in zip(s, t, strict=True))


@pytest.mark.parametrize("counts", [(4,), (1, 3), (3, 1), (1, 1, 2)])
@pytest.mark.parametrize("num_levels", [1, 2, 3, 4])
def test_rows_one_by_one_equal_the_reference_bit_for_bit(num_levels: int, counts: tuple[int, ...]) -> None:
    assert same(streamed(spec(num_levels), counts), expected(spec(num_levels)))


@pytest.mark.parametrize("policy", ["clean", "last"])
@pytest.mark.parametrize("streams", [1, 3])
def test_other_policies_equal_the_reference_bit_for_bit(policy: str, streams: int) -> None:
    own = spec(2, policy=policy, streams=streams)
    assert same(streamed(own), expected(own))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("more", [dict(), dict(streams=2, guidance_scale=3.0)], ids=["one stream", "two with guidance"])
def test_rows_in_one_batch_equal_the_reference_up_to_rounding(
    dtype: torch.dtype, tolerance: float, more: dict[str, Any]
) -> None:
    own = spec(2 if more else 3, **more)
    pairs = zip(streamed(own, batched=True, dtype=dtype), expected(own, dtype=dtype), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(torch.cat(one), torch.cat(other), rtol=tolerance, atol=tolerance)


class _BlockCausal(WanAttnProcessor):
    """Plain attention in which the tokens of a chunk see their own chunk and earlier ones."""

    def __init__(self, tokens: int, chunks: int) -> None:
        super().__init__()
        chunk = torch.arange(tokens * chunks) // tokens
        self.mask = (chunk[:, None] >= chunk[None, :])[None, None]

    def __call__(self, attn: Any, hidden_states: Any, text: Any, mask: Any, rotary: Any) -> Any:
        return super().__call__(attn, hidden_states, text, self.mask, rotary)


def test_with_a_window_over_everything_a_stream_is_one_forward_with_a_block_causal_mask() -> None:
    chunks, sigma = 5, 0.8
    own = StreamSpec(levels=(sigma,), frames_per_chunk=2, window=2 * chunks)
    model, sources = reference.model(torch.float64), [video.double() for video in reference.video(chunks)]
    made = harness.stages(model, own, (4,), batched=True)
    (finished,), _ = harness.run(made, [[StreamInput(latents) for latents in sources]])
    noise = harness.noise(torch.float64)
    whole = torch.cat([(1 - sigma) * video + sigma * noise(0, k, 0) for k, video in enumerate(sources)], dim=2)
    plain = reference.model(torch.float64)
    for block in plain.blocks:
        block.attn1.set_processor(_BlockCausal(2 * 4 * 4, chunks))
    time, text = torch.tensor([sigma * 1000]), reference.text(10, torch.float64)
    with torch.no_grad():
        flow = plain(whole, time, text, return_dict=False)[0]
    torch.testing.assert_close(torch.cat(finished, dim=2), whole - sigma * flow, rtol=1e-11, atol=1e-11)


# ---- what must not pass ---------------------------------------------------------------------------------------------------


def test_another_policy_is_not_the_reference() -> None:
    assert not same(streamed(spec(2, policy="last")), expected(spec(2)))
    assert not same(streamed(spec(2, policy="clean")), expected(spec(2)))


@pytest.mark.parametrize("shifted", ["position", "sink_shift"])
def test_a_frame_offset_off_by_one_is_not_the_reference(monkeypatch: pytest.MonkeyPatch, shifted: str) -> None:
    def off_by_one(written: int, own: StreamSpec) -> Place:
        place = place_of(written, own)
        changes = {name: getattr(place, name) for name in ("own", "seen", "position", "sink_shift")}
        return Place(**{**changes, shifted: changes[shifted] + (written == 4)})

    monkeypatch.setattr(passes, "place_of", off_by_one)
    wrong, right = streamed(spec(2))[0], expected(spec(2))[0]
    assert same([wrong[:4]], [right[:4]])
    assert (wrong[4] - right[4]).abs().max() > 1e-4


def test_keys_without_their_ring_pointer_are_not_the_reference() -> None:
    made = harness.stages(reference.model(), spec(2), (1, 3), batched=False)
    with torch.no_grad():
        running = run_in_one_process(made, [endless()], harness.noise(torch.float32))
        chunks = [next(running).latents for _ in range(4)]
        cache = made[0].caches.of("blocks.2")
        moved = [Pointer(0, pointer.next_chunk) for pointer in cache.pointers]
        cache.pointers = moved
        chunks += [next(running).latents for _ in range(3)]
        assert same([chunks[:4]], [expected(spec(2))[0][:4]])
        assert not torch.equal(chunks[5], expected(spec(2))[0][5])
        cache.pointers = [Pointer() for _ in cache.pointers]
        with pytest.raises(InputError, match="where chunk 0 is due"):
            next(running)


# ---- streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_stages", "chunks"), [(1, 2), (3, 1), (3, 5), (4, 2), (4, 5)])
def test_every_chunk_comes_out_once_and_in_order(num_stages: int, chunks: int) -> None:
    counts = {1: (4,), 3: (1, 1, 2), 4: (1, 1, 1, 1)}[num_stages]
    made = harness.stages(reference.model(), spec(3), counts, batched=True)
    _, finished = harness.run(made, [[StreamInput()] * chunks])
    assert [chunk.index for chunk in finished] == list(range(chunks))


def test_a_stream_that_starts_anew_has_forgotten_what_was_before() -> None:
    inputs = [StreamInput(first=chunk == 3) for chunk in range(CHUNKS)]
    known = reference.Reference(reference.model(), spec(2))
    expected_chunks = known.run(0, CHUNKS, {0: reference.text(10)}, starts=(0, 3))
    (chunks,), _ = harness.run(harness.stages(reference.model(), spec(2), (1, 3), batched=False), [inputs])
    assert same([chunks], [expected_chunks])


def test_what_is_in_flight_comes_out_while_the_source_waits() -> None:
    made = harness.stages(reference.model(), spec(2), (1, 1, 2), batched=False)
    finished: list[torch.Tensor] = []

    def source() -> Iterator[StreamInput | Pending]:
        yield from [StreamInput()] * 3
        for _ in range(100):
            if len(finished) == 3:
                break
            yield PENDING
        assert len(finished) == 3
        yield StreamInput()

    with torch.no_grad():
        for chunk in run_in_one_process(made, [source()], harness.noise(torch.float32)):
            finished.append(chunk.latents)
    assert same([finished], [expected(spec(2))[0][:4]])


def test_streams_end_at_different_times() -> None:
    own = spec(2, streams=2)
    made = harness.stages(reference.model(), own, (1, 3), batched=False)
    (long, short), _ = harness.run(made, [[StreamInput()] * CHUNKS, [StreamInput()] * 2])
    assert same([long, short], [expected(own)[0], expected(own)[1][:2]])


def test_positions_go_beyond_the_models_own_table() -> None:
    own = spec(1, window=2)
    model = reference.model(layers=1)
    assert model.config.rope_max_seq_len == 32
    made = harness.stages(model, own, (1,), batched=False)
    (chunks,), _ = harness.run(made, [[StreamInput()] * 40])
    known = reference.Reference(reference.model(layers=1), own).run(0, 40, {0: reference.text(10)})
    assert same([chunks], [known])


def test_memory_is_flat_over_two_thousand_chunks() -> None:
    made = harness.stages(reference.model(layers=1), spec(1, window=2), (1,), batched=True)
    tensors = []
    with torch.no_grad():
        running = run_in_one_process(made, [endless()], harness.noise(torch.float32))
        for index, chunk in zip(range(2000), running, strict=False):
            assert chunk.index == index
            if index in (100, 1999):
                gc.collect()
                tensors.append(sum(type(own) is torch.Tensor for own in gc.get_objects()))
    assert torch.isfinite(chunk.latents).all()
    assert tensors[0] == tensors[1]


def test_sources_are_one_per_stream_and_their_latents_fit() -> None:
    made = harness.stages(reference.model(), spec(2), (4,))
    with pytest.raises(InputError, match="2 sources for 1 streams"):
        harness.run(made, [[], []])
    with pytest.raises(InputError, match=r"a source gave latents shaped \(1, 4, 1, 8, 8\)"):
        harness.run(made, [[StreamInput(torch.zeros(1, 4, 1, 8, 8))]])
    with pytest.raises(InputError, match=r"noise_scale=1\.5"):
        harness.run(made, [[StreamInput(noise_scale=1.5)]])
