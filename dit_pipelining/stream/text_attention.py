"""Cross-attention for the blocks of Wan that computes the keys and values of a prompt once."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from dit_pipelining.stream.passes import Passes


class KeptTextAttention:
    """The attention processor of one block's cross-attention in a stream.

    A stage gives its blocks the very same tensor as long as the prompts of the rows are the same, so its keys and values are
    kept: of a chunk of 1,560 tokens they are 4% of a block's work.

    Args:
        passes: what the stage runs at the moment.
        plain: the processor that was there before; it acts outside of a pass.
    """

    def __init__(self, passes: Passes, plain: Any) -> None:
        self.passes = passes
        self.plain = plain
        self._text: torch.Tensor | None = None
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

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
        if self._kept is None or self._text is not encoder_hidden_states:
            self._text, self._kept = encoder_hidden_states, _keys_and_values(attn, encoder_hidden_states)
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        attended = dispatch_attention_fn(query, *self._kept, backend=getattr(self.plain, "_attention_backend", None))
        output: torch.Tensor = attn.to_out[1](attn.to_out[0](attended.flatten(2, 3).type_as(query)))
        return output


def _keys_and_values(attn: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if getattr(attn, "fused_projections", False):
        key, value = attn.to_kv(text).chunk(2, dim=-1)
    else:
        key, value = attn.to_k(text), attn.to_v(text)
    return attn.norm_k(key).unflatten(2, (attn.heads, -1)), value.unflatten(2, (attn.heads, -1))
