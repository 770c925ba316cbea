"""Causal self-attention for the blocks of Wan: own keys and values, and those that the cache holds."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn

from dit_pipelining.stream.cache import RollingKVCache
from dit_pipelining.stream.passes import Group, Passes
from dit_pipelining.stream.rotary import Table
from dit_pipelining.stream.text_attention import KeptTextAttention


def rotate(states: torch.Tensor, table: Table) -> torch.Tensor:
    """Rotate pairs of channels, in Wan's order and rounding.

    Args:
        states: (rows, tokens, heads, channels).
        table: cosines and sines, each number twice in a row.
    """
    first, second = states.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table[0][..., 0::2], table[1][..., 1::2]
    rotated = torch.empty_like(states)
    rotated[..., 0::2] = first * cos - second * sin
    rotated[..., 1::2] = first * sin + second * cos
    return rotated


@functools.cache
def compiled_rotate() -> Callable[[torch.Tensor, Table], torch.Tensor]:
    """`rotate` as one kernel: as eight of them, with sinks, it takes a third as long as the rest of a block."""
    compiled: Callable[[torch.Tensor, Table], torch.Tensor] = torch.compile(rotate)
    return compiled


class CausalSelfAttention:
    """The attention processor of one block's self-attention in a stream.

    Args:
        passes: what the stage runs at the moment.
        cache: of this block.
        plain: the processor that was there before; it acts outside of a pass.
        rotate: rotates pairs of channels.
    """

    def __init__(self, passes: Passes, cache: RollingKVCache, plain: Any, rotate: Callable[..., torch.Tensor]) -> None:
        self.passes = passes
        self.cache = cache
        self.plain = plain
        self.rotate = rotate

    @torch.compiler.disable  # in a compiled block the caches and their pointers stay plain Python
    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Table | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As the processors of diffusers; `hidden_states` (rows, tokens, channels) are those of the current rows."""
        if self.passes.current is None:
            plain: torch.Tensor = self.plain(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs
            )
            return plain
        plan = self.passes.plan(self.cache)
        if getattr(attn, "fused_projections", False):
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        query = attn.norm_q(query).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(key).unflatten(2, (attn.heads, -1))
        value = value.unflatten(2, (attn.heads, -1))
        keys, values, raw_sinks = self.cache.reserve(key)
        tokens = key.shape[1]
        for row, cache, start in plan.raw:
            raw_sinks[cache, start : start + tokens] = key[row]
        query, key = self.rotate(query, plan.table), self.rotate(key, plan.table)
        keys.flatten(0, 1).index_copy_(0, plan.slots, key.flatten(0, 1))
        values.flatten(0, 1).index_copy_(0, plan.slots, value.flatten(0, 1))
        for sinks in plan.sinks:
            end = sinks.first + sinks.count
            keys[sinks.first : end, : raw_sinks.shape[1]] = self.rotate(raw_sinks[sinks.first : end], sinks.table)
        attended = [self._attend(query, keys, values, group) for group in plan.groups]
        hidden_states = (attended[0] if len(attended) == 1 else torch.cat(attended)).flatten(2, 3).type_as(query)
        hidden_states = attn.to_out[1](attn.to_out[0](hidden_states))
        return hidden_states

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group) -> torch.Tensor:
        caches = slice(group.first_cache, group.first_cache + group.count)
        seen = group.seen * query.shape[1]
        attended: torch.Tensor = dispatch_attention_fn(
            query[group.first_row : group.first_row + group.count],
            keys[caches, :seen],
            values[caches, :seen],
            backend=getattr(self.plain, "_attention_backend", None),
        )
        return attended


def make_causal(
    blocks: Iterable[nn.Module], caches: Iterable[RollingKVCache], passes: Passes, compiled: bool = False
) -> None:
    """Exchange the attention processors of blocks."""
    turn = compiled_rotate() if compiled else rotate
    for block, cache in zip(blocks, caches, strict=True):
        make_plain([block])
        own: Any = block
        own.attn1.processor = CausalSelfAttention(passes, cache, own.attn1.processor, turn)
        own.attn2.processor = KeptTextAttention(passes, own.attn2.processor)


def make_plain(blocks: Iterable[nn.Module]) -> None:
    """Undo `make_causal`."""
    for block in blocks:
        own: Any = block
        for attention in (own.attn1, own.attn2):
            if isinstance(attention.processor, CausalSelfAttention | KeptTextAttention):
                attention.processor = attention.processor.plain
