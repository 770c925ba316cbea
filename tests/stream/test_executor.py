"""A stream through stages equals the sequential reference on the unsplit diffusers model."""

import pytest
import torch

from dit_pipelining.stream import attention, cache
from dit_pipelining.stream.head import StreamInput
from dit_pipelining.stream.spec import StreamSpec
from tests.stream import harness, reference

LEVELS = (1.0, 0.8, 0.55, 0.3)
CHUNKS = 7


def spec(num_levels: int = 2, **more: object) -> StreamSpec:
    return StreamSpec(**{**dict(levels=LEVELS[:num_levels], frames_per_chunk=2, window=4, sinks=2), **more})


def expected(own: StreamSpec, chunks: int = CHUNKS, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    known = reference.Reference(reference.model(dtype), own)
    negative = reference.text(99, dtype)
    return [known.run(s, chunks, {0: reference.text(10 + s, dtype)}, negative) for s in range(own.streams)]


def streamed(
    own: StreamSpec, counts: tuple[int, ...], batched: bool, chunks: int = CHUNKS, dtype: torch.dtype = torch.float32
) -> list[list[torch.Tensor]]:
    made = harness.stages(reference.model(dtype), own, counts, batched)
    return harness.run(made, [[StreamInput()] * chunks] * own.streams)[0]


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    assert [len(own) for own in one] == [len(own) for own in other]
    return all(torch.equal(a, b) for s, t in zip(one, other, strict=True) for a, b in zip(s, t, strict=True))


@pytest.mark.parametrize("num_levels", [1, 2, 3, 4])
@pytest.mark.parametrize("counts", [(4,), (1, 3), (3, 1), (1, 1, 2)])
def test_rows_one_by_one_equal_the_reference_bit_for_bit(num_levels: int, counts: tuple[int, ...]) -> None:
    assert same(streamed(spec(num_levels), counts, batched=False), expected(spec(num_levels)))


@pytest.mark.parametrize("policy", ["clean", "last"])
@pytest.mark.parametrize("streams", [1, 3])
def test_other_policies_equal_the_reference_bit_for_bit(policy: str, streams: int) -> None:
    own = spec(2, policy=policy, streams=streams)
    assert same(streamed(own, (1, 3), batched=False), expected(own))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("streams", [1, 2])
def test_rows_in_one_batch_equal_the_reference_up_to_rounding(
    dtype: torch.dtype, tolerance: float, streams: int
) -> None:
    own = spec(3, streams=streams, guidance_scale=3.0 if streams == 2 else 1.0)
    pairs = zip(streamed(own, (1, 3), True, dtype=dtype), expected(own, dtype=dtype), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(torch.cat(one), torch.cat(other), rtol=tolerance, atol=tolerance)
