"""Cross-attention for the blocks of Wan that computes the keys and values of a prompt once."""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from dit_pipelining.stream.passes import Passes


class KeptTextAttention:
    """The attention processor of one block's cross-attention in a stream.

    As long as the prompts of the rows are the same, their keys and values are kept: of a chunk of 1,560 tokens they are 4% of
    a block's work. Those of new prompts are written to where the old ones were, which a recorded CUDA graph reads.

    Args:
        passes: what the stage runs at the moment.
        plain: the processor that was there before; it acts outside of a pass.
    """

    def __init__(self, passes: Passes, plain: Any) -> None:
        self.passes = passes
        self.plain = plain
        self._kept: dict[int, _Kept] = {}

    @torch.compiler.disable
    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As the processors of diffusers; `encoder_hidden_states` (rows, text tokens, channels)."""
        if self.passes.current is None:
            plain: torch.Tensor = self.plain(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs
            )
            return plain
        key, value = self._keys_and_values(attn, encoder_hidden_states)
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        attended = dispatch_attention_fn(query, key, value, backend=getattr(self.plain, "_attention_backend", None))
        output: torch.Tensor = attn.to_out[1](attn.to_out[0](attended.flatten(2, 3).type_as(query)))
        return output

    def _keys_and_values(self, attn: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Kept for each number of rows."""
        shown = self.passes.text
        assert shown is not None
        kept = self._kept.get(len(text))
        if kept is None:
            kept = self._kept[len(text)] = _Kept(shown, *_keys_and_values(attn, text))
        elif kept.text is not shown:
            for own, new in zip((kept.key, kept.value), _keys_and_values(attn, text), strict=True):
                own.copy_(new)
            kept.text = shown
        return kept.key, kept.value


@dataclass
class _Kept:
    """The keys and values of prompts."""

    text: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def _keys_and_values(attn: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if getattr(attn, "fused_projections", False):
        key, value = attn.to_kv(text).chunk(2, dim=-1)
    else:
        key, value = attn.to_k(text), attn.to_v(text)
    return attn.norm_k(key).unflatten(2, (attn.heads, -1)), value.unflatten(2, (attn.heads, -1))
