"""Forward passes for training that give what the pipeline's own passes give, at a fraction of the cost.

`AutoencoderKLWan` encodes and decodes four frames at a time through caches; `whole_sequence` lets encoder and decoder take
all frames at once. `WanPipeline` pads a prompt's embedding to 512 positions with zeros, and Wan's cross-attention has no
mask; `CompactPadding` replaces hundreds of equal positions by a few, each counted as often as it stood there.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify, unpatchify
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import nn
from transformers import UMT5EncoderModel


def _resample_all_frames(
    self: WanResample, x: torch.Tensor, feat_cache: Any = None, feat_idx: Any = None
) -> torch.Tensor:
    """What the chunks of `WanResample.forward` give together, for 1 + 2k frames; the first frame stays alone in time."""
    if self.mode == "upsample3d" and x.shape[2] > 1:
        batch, channels, _, height, width = x.shape
        rest = self.time_conv(x[:, :, 1:]).view(batch, 2, channels, -1, height, width)
        rest = torch.stack([rest[:, 0], rest[:, 1]], dim=3).flatten(2, 3)
        x = torch.cat([x[:, :, :1], rest], dim=2)
    batch, _, frames, _, _ = x.shape
    x = self.resample(x.transpose(1, 2).flatten(0, 1))
    x = x.unflatten(0, (batch, frames)).transpose(1, 2)
    if self.mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], dim=2)
    return x


def whole_sequence(vae: AutoencoderKLWan) -> None:
    """Make the encoder and the decoder of `vae` right for all frames at once when they get no cache.

    Passes with a cache, which `vae.encode` and `vae.decode` make, are as before.
    """
    for module in vae.modules():
        if isinstance(module, WanResample):
            cached = module.forward

            def forward(
                self: WanResample, x: torch.Tensor, feat_cache: Any = None, feat_idx: Any = None, cached: Any = cached
            ) -> torch.Tensor:
                return _resample_all_frames(self, x) if feat_cache is None else cached(x, feat_cache, feat_idx)

            module.forward = types.MethodType(forward, module)


def encode_all_frames(vae: AutoencoderKLWan, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and logarithm of the variance of the latents, each (batch, channels, frames, height, width).

    Args:
        vae: A VAE prepared by `whole_sequence`.
        video: (batch, 3, frames, height, width) in [-1, 1], with 1 + 4k frames.
    """
    moments = vae.quant_conv(vae.encoder(patchify(video, vae.config.patch_size)))
    mean, log_variance = moments.chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode_all_frames(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """The video of latents, without the final clamp to [-1, 1].

    Args:
        vae: A VAE prepared by `whole_sequence`.
        latents: (batch, channels, frames, height, width), not normalised.
    """
    decoded = vae.decoder(vae.post_quant_conv(latents), first_chunk=True)
    return unpatchify(decoded, vae.config.patch_size)


class _WeightedCrossAttention:
    """Wan's cross-attention, with the last channel of the text added to the attention logits of its position."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: None = None,
        rotary_emb: None = None,
    ) -> torch.Tensor:
        text, bias = encoder_hidden_states[..., :-1], encoder_hidden_states[..., -1].detach()
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        key = attn.norm_k(attn.to_k(text)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        value = attn.to_v(text).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        query, key = query.type_as(value), key.type_as(value)
        mask = bias[:, None, None, :].type_as(value).expand(-1, attn.heads, query.shape[2], -1)
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2, 3)))


class CompactPadding:
    """Runs a transformer on text of a few positions as if it were padded with zeros to many.

    `padding` positions whose embedding is zero have equal keys and values, so `present` of them with log(padding / present)
    added to their logits weigh as much in the softmax. The transformer must not be used without this object afterwards.

    Args:
        transformer: The transformer; its cross-attention processors are replaced.
    """

    def __init__(self, transformer: WanTransformer3DModel) -> None:
        self.transformer = transformer
        self._bias: torch.Tensor | None = None
        for block in transformer.blocks:
            block.attn2.processor = _WeightedCrossAttention()
        transformer.condition_embedder.register_forward_hook(self._append_bias)
        # Keep the residual stream in float32 when training under autocast, as it is when the pipeline runs in float32.
        transformer.patch_embedding.register_forward_hook(lambda module, args, output: output.float())

    def _append_bias(self, module: nn.Module, args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        assert self._bias is not None
        temb, projection, text, image = output
        return temb, projection, torch.cat([text.float(), self._bias[..., None]], dim=-1), image

    def __call__(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        text: torch.Tensor,
        lengths: torch.Tensor,
        padded_length: torch.Tensor,
    ) -> torch.Tensor:
        """The transformer's output.

        Args:
            latents: (batch, channels, frames, height, width).
            timestep: (batch,), in [0, 1000].
            text: Embeddings (batch, positions, channels), zero from each prompt's length on; at least one position is.
            lengths: Positions used by each prompt, (batch,).
            padded_length: Positions each prompt is to be padded to, (batch,), at least `positions`.
        """
        positions = text.shape[1]
        repeats = (padded_length - lengths).float() / (positions - lengths).float()
        padding = torch.arange(positions, device=text.device)[None] >= lengths[:, None]
        self._bias = torch.where(padding, repeats.log()[:, None], math.log(1.0))
        return self.transformer(latents, timestep, text, return_dict=False)[0]


def embed_text(text_encoder: UMT5EncoderModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Embeddings (batch, positions, channels), zero where `mask` is, as the pipeline hands them to the transformer."""
    return text_encoder(ids, mask).last_hidden_state * mask[..., None]
