"""Attention over tokens that lie on several ranks.

[Note: what is exchanged]
Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): before attention each rank gives the tokens of all heads but its share for
the other ranks' tokens of its share of the heads; afterwards it gives them back. Ring: each rank gathers the keys and values
of the ring and attends to all of them with its own queries, as diffusers' ring attention does with the only
`rotate_method` it has ("allgather"). What diffusers does then, attend to one rank's keys after the other and merge the
results by their log-sum-exp, is not needed once all keys are there: one kernel attends to them together, on every device,
with any mask, and rounds as attention on one rank does.

Both come down to one call of `scaled_dot_product_attention` with some heads, some queries and all keys. The order of the
keys is that of the parts: text and image tokens of a joint attention are mixed. That changes no result but its last bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from dit_pipelining.errors import InputError
from dit_pipelining.sharding.groups import SequenceGroups, exchange_parts, exchange_sizes, gather_parts
from dit_pipelining.torch_internals import is_fake


class TokenAttention(TorchFunctionMode):
    """Inside it, `scaled_dot_product_attention` attends to the tokens of all ranks.

    Args:
        groups: the ranks that share the tokens.
        uneven: ranks may have different numbers of tokens; their hosts then tell each other how many, at each attention.

    Attributes:
        calls: how often attention was computed inside.
    """

    def __init__(self, groups: SequenceGroups, uneven: bool) -> None:
        super().__init__()
        self.groups = groups
        self.uneven = uneven
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return attend(self.groups, self.uneven, *args, **(kwargs or {}))


def attend(
    groups: SequenceGroups,
    uneven: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` of this rank's queries over the keys of all ranks.

    Args:
        groups: the ranks that share the tokens.
        uneven: whether they may have different numbers of them.
        query: (batch, heads, own tokens, dim).
        key: (batch, heads or a divisor of it, own tokens, dim).
        value: of the same shape but for its dim.
        attn_mask: (batch or 1, heads or 1, 1, own keys): which of this rank's keys count.
        dropout_p: as in torch.
        is_causal: refused.
        scale: as in torch.
        enable_gqa: as in torch.

    Returns:
        (batch, heads, own tokens, dim).

    Raises:
        InputError: an attention that cannot be spread: causal, with a mask that tells queries apart, or with a number of
            heads that does not divide.
    """
    if is_causal:
        raise InputError("causal attention cannot be spread over ranks by tokens; use ulysses_degree=1, ring_degree=1.")
    if query.shape[1] % groups.ulysses_degree:
        raise InputError(
            f"an attention with {query.shape[1]} heads on each rank cannot share them among ulysses_degree="
            f"{groups.ulysses_degree} ranks; use a degree that divides them, or ring_degree."
        )
    counts = _Counts.of(groups, uneven and not is_fake(query), query.shape[2], key.shape[2])
    if attn_mask is not None:
        attn_mask = _all_of_mask(attn_mask, query.shape[1], key.shape[2], counts.keys, groups)
    if query.shape == key.shape == value.shape:
        both = _heads_for_tokens(torch.cat([query, key, value], dim=-1), counts.queries, groups)
        query, keys = both.split([query.shape[-1], 2 * query.shape[-1]], dim=-1)
    else:
        query = _heads_for_tokens(query, counts.queries, groups)
        keys = _heads_for_tokens(torch.cat([key, value], dim=-1), counts.keys, groups)
    if groups.ring is not None:
        keys = gather_parts(keys, 2, _ring_sizes(counts.keys, groups), groups.ring)
    dim = query.shape[-1]
    attended = scaled_dot_product_attention(
        query.contiguous(),
        keys[..., :dim].contiguous(),
        keys[..., dim:].contiguous(),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return _tokens_for_heads(attended, counts.queries, groups)


@dataclass(frozen=True)
class _Counts:
    """How many queries and keys every rank has, in the order of the parts."""

    queries: Sequence[int]
    keys: Sequence[int]

    @classmethod
    def of(cls, groups: SequenceGroups, uneven: bool, queries: int, keys: int) -> "_Counts":
        # While a forward is recorded only shapes matter, and the shape of the result is that of this rank's queries.
        if uneven:
            return cls(*exchange_sizes(groups, queries, keys))
        return cls([queries] * groups.size, [keys] * groups.size)


def _heads_for_tokens(tensor: torch.Tensor, sizes: Sequence[int], groups: SequenceGroups) -> torch.Tensor:
    """(batch, heads, own tokens, dim) -> (batch, a share of the heads, tokens of the Ulysses group, dim)."""
    group = groups.ulysses
    if group is None:
        return tensor
    batch, heads, own, dim = tensor.shape
    share = heads // group.size()
    sizes = _ulysses_sizes(sizes, groups)
    per_token = share * batch * dim
    received = exchange_parts(
        tensor.transpose(0, 1).reshape(-1), [own * per_token] * group.size(), [n * per_token for n in sizes], group
    )
    parts = received.split([n * per_token for n in sizes])
    return torch.cat([p.view(share, batch, n, dim) for p, n in zip(parts, sizes, strict=True)], dim=2).transpose(0, 1)


def _tokens_for_heads(tensor: torch.Tensor, sizes: Sequence[int], groups: SequenceGroups) -> torch.Tensor:
    """(batch, a share of the heads, tokens of the Ulysses group, dim) -> (batch, heads, own tokens, dim)."""
    group = groups.ulysses
    if group is None:
        return tensor
    batch, share, _, dim = tensor.shape
    sizes = _ulysses_sizes(sizes, groups)
    own, per_token = sizes[group.rank()], share * batch * dim
    sent = torch.cat([part.transpose(0, 1).reshape(-1) for part in tensor.split(sizes, dim=2)])
    received = exchange_parts(sent, [n * per_token for n in sizes], [own * per_token] * group.size(), group)
    return received.view(group.size() * share, batch, own, dim).transpose(0, 1)


def _ulysses_sizes(sizes: Sequence[int], groups: SequenceGroups) -> list[int]:
    """Those of this rank's Ulysses group."""
    degree = groups.ulysses_degree
    first = groups.rank // degree * degree
    return list(sizes[first : first + degree])


def _ring_sizes(sizes: Sequence[int], groups: SequenceGroups) -> list[int]:
    """What each rank of the ring has after Ulysses: the tokens of its Ulysses group."""
    degree = groups.ulysses_degree
    return [sum(sizes[first : first + degree]) for first in range(0, len(sizes), degree)]


def _all_of_mask(
    mask: torch.Tensor, heads: int, own_keys: int, sizes: Sequence[int], groups: SequenceGroups
) -> torch.Tensor:
    """The mask for all keys, and for this rank's share of the heads."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if mask.shape[2] != 1 or mask.shape[3] not in (1, own_keys):
        raise InputError(
            f"an attention mask of shape {tuple(mask.shape)} tells queries apart, or covers other keys than the "
            f"{own_keys} of this rank; attention with such a mask cannot be spread by tokens. Use ulysses_degree=1 and "
            "ring_degree=1 for this model."
        )
    if not mask.shape[3] == 1 != own_keys:
        mask = gather_parts(mask, 3, sizes, groups.tokens)
    if mask.shape[1] == heads and heads > 1 and groups.ulysses is not None:
        mask = mask.chunk(groups.ulysses_degree, dim=1)[groups.ulysses.rank()]
    return mask
