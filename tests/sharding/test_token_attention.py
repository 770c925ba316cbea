"""Attention over the tokens of all ranks is attention over all tokens."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from dit_pipelining.comm.layout import Layout
from dit_pipelining.errors import InputError
from dit_pipelining.sharding.groups import make_sequence_groups, split_sizes
from dit_pipelining.sharding.token_attention import TokenAttention, attend
from tests.distributed import RankPool

BATCH, HEADS, TOKENS, TEXT, DIM = 2, 4, 11, 6, 8


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def own_part(tensor: torch.Tensor, dim: int = 2) -> torch.Tensor:
    return tensor.tensor_split(dist.get_world_size(), dim=dim)[dist.get_rank()]


def largest_differences(ring: int, ulysses: int) -> list[float]:
    groups = make_sequence_groups(
        Layout(ring=ring, ulysses=ulysses), dist.get_rank(), torch.device("cpu"), timedelta(seconds=60)
    )
    query, key, value = randn(BATCH, HEADS, TOKENS, DIM), randn(BATCH, HEADS, TOKENS, DIM) + 1, randn(2, 4, 11, 8) - 1
    text, text_value = randn(BATCH, HEADS, TEXT, DIM), randn(BATCH, HEADS, TEXT, DIM + 2)
    few_heads = randn(BATCH, HEADS // 2, TOKENS, DIM)
    padding = torch.tensor([[True] * 9 + [False] * 2, [True] * 11])[:, None, None]
    bias = randn(BATCH, HEADS, 1, TOKENS)
    found = []
    for q, k, v, mask, grouped in (
        (query, key, value, None, False),
        (query, text, text_value, None, False),
        (query, key, value, padding, False),
        (query, key, value, bias, False),
        (query, few_heads, few_heads, None, True),
    ):
        expected = own_part(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped))
        own_mask = None if mask is None else own_part(mask, 3)
        own = attend(groups, True, own_part(q), own_part(k), own_part(v), own_mask, enable_gqa=grouped)
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)
        found.append(float((own - expected).abs().max()))
    parts = [own_part(part) for part in (query, key, value)]
    with TokenAttention(groups, uneven=True) as attention:
        inside = scaled_dot_product_attention(*parts)
    assert torch.equal(inside, attend(groups, True, *parts))
    assert attention.calls == 1
    for wrong in (dict(is_causal=True), dict(attn_mask=torch.ones(BATCH, 1, parts[0].shape[2], parts[1].shape[2]))):
        with pytest.raises(InputError, match="by tokens"):
            attend(groups, True, *parts, **wrong)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (3, 1), (2, 2)])
def test_each_rank_gets_its_part_of_attention_over_all_tokens(ranks: RankPool, ring: int, ulysses: int) -> None:
    for found in ranks.run(ring * ulysses, largest_differences, ring, ulysses):
        if ring == 1:  # each head is computed as on one rank
            assert found == [0.0] * 5


def test_parts_are_as_torch_cuts_them() -> None:
    for total in range(1, 20):
        for parts in range(1, 6):
            expected = tuple(len(part) for part in torch.arange(total).tensor_split(parts))
            assert split_sizes(total, parts) == expected
