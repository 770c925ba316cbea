"""Sana: image, video, the world model and its LTX-2 refiner."""

import torch
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

from .case import Case, built, full, keep_first, randn, values

SANA = dict(
    patch_size=1,
    in_channels=4,
    out_channels=4,
    num_layers=4,
    attention_head_dim=4,
    num_attention_heads=2,
    num_cross_attention_heads=2,
    cross_attention_head_dim=4,
    cross_attention_dim=8,
    caption_channels=8,
    sample_size=16,
)
SANA_INPUTS = dict(
    hidden_states=randn(2, 4, 16, 16),
    encoder_hidden_states=randn(2, 8, 8),
    timestep=values([44, 239], torch.int64),
)

VIDEO = SANA | dict(
    patch_size=(1, 2, 2),
    attention_head_dim=12,
    cross_attention_head_dim=12,
    cross_attention_dim=24,
    rope_max_seq_len=32,
)
VIDEO_INPUTS = dict(
    hidden_states=randn(2, 4, 2, 8, 8),
    encoder_hidden_states=randn(2, 8, 8),
    timestep=values([44, 239], torch.int64),
    encoder_attention_mask=keep_first([8, 5], 8, torch.int64),
)

# Blocks 3 and 7 use softmax attention, the others linear attention; the last two take no rays after attention.
WORLD = dict(
    in_channels=4,
    num_layers=8,
    hidden_size=32,
    num_attention_heads=2,
    patch_size=(1, 1, 1),
    softmax_every_n=4,
    linear_head_dim=16,
    chunk_plucker_channels=6,
    chunk_plucker_post_attn_blocks=6,
    caption_channels=12,
    mlp_ratio=2.0,
)


def _cameras(generator: torch.Generator) -> torch.Tensor:
    """A camera pose (4 x 4, moved between frames) and fx, fy, cx, cy for each of 3 latent frames, for 2 samples."""
    poses = torch.eye(4).repeat(2, 3, 1, 1)
    poses[..., :3, 3] = torch.randn(2, 3, 3, generator=generator)
    lens = torch.tensor([5.0, 5.0, 2.0, 2.0]).expand(2, 3, 4)
    return torch.cat([poses.flatten(2), lens], dim=-1)


WORLD_INPUTS = dict(
    hidden_states=randn(2, 4, 3, 4, 4),
    # One timestep per latent frame: the first frame is given.
    timestep=values([[[0.0, 500.0, 500.0]], [[0.0, 500.0, 500.0]]], torch.float32),
    encoder_hidden_states=randn(2, 1, 6, 12),
    mask=keep_first([6, 4], 6, torch.int64),
    data_info=dict(img_hw=full((1, 2), 128.0)),
    camera_conditions=built(_cameras),
    chunk_plucker=randn(2, 6, 3, 4, 4),
)

REFINER = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=8,
    cross_attention_dim=16,
    audio_in_channels=4,
    audio_out_channels=4,
    audio_num_attention_heads=2,
    audio_attention_head_dim=4,
    audio_cross_attention_dim=8,
    num_layers=4,
    caption_channels=16,
)
# A block of 2 latent frames of 2 x 4 tokens.
REFINER_INPUTS = dict(
    hidden_states=randn(1, 16, 4),
    encoder_hidden_states=randn(1, 6, 16),
    timestep=full((1, 16), 700.0),
    video_rotary_emb=(randn(1, 16, 16), randn(1, 16, 16)),
    encoder_attention_mask=keep_first([4], 6, torch.float32),
)


def _filled_cache(generator: torch.Generator) -> SanaWMRefinerKVCache:
    """One frame of attention sink and two frames of history for every block."""
    cache = SanaWMRefinerKVCache(4)
    cache.sink_pe = (torch.randn(1, 8, 16, generator=generator), torch.randn(1, 8, 16, generator=generator))
    for layer in cache.layer_caches:
        layer.store_sink(torch.randn(1, 8, 16, generator=generator), torch.randn(1, 8, 16, generator=generator))
        layer.store_history(torch.randn(1, 16, 16, generator=generator), torch.randn(1, 16, 16, generator=generator))
    return cache


CASES = (
    Case("SanaTransformer", "SanaTransformer2DModel", SANA, SANA_INPUTS),
    Case(
        "SanaTransformer@controlnet-mask",
        "SanaTransformer2DModel",
        SANA,
        SANA_INPUTS
        | dict(
            encoder_attention_mask=keep_first([8, 5], 8, torch.int64),
            controlnet_block_samples=(randn(2, 256, 8), randn(2, 256, 8)),
        ),
    ),
    Case(
        "SanaTransformer@sprint",
        "SanaTransformer2DModel",
        SANA | dict(guidance_embeds=True, qk_norm="rms_norm_across_heads", interpolation_scale=1),
        SANA_INPUTS | dict(guidance=full((2,), 0.45)),
    ),
    Case("SanaVideoTransformer", "SanaVideoTransformer3DModel", VIDEO, VIDEO_INPUTS),
    Case(
        "SanaVideoTransformer@i2v",
        "SanaVideoTransformer3DModel",
        VIDEO,
        # One timestep per token: the first of the two frames is given.
        VIDEO_INPUTS
        | dict(timestep=built(lambda _: torch.tensor([0.0, 44.0]).view(1, 1, 2, 1, 1).repeat(2, 1, 1, 4, 4))),
    ),
    Case("SanaWMTransformer", "SanaWMTransformer3DModel", WORLD, WORLD_INPUTS),
    Case(
        "SanaWMLTX2RefinerTransformer",
        "SanaWMLTX2RefinerTransformer3DModel",
        REFINER,
        REFINER_INPUTS,
    ),
    Case(
        "SanaWMLTX2RefinerTransformer@kv-inject",
        "SanaWMLTX2RefinerTransformer3DModel",
        REFINER,
        REFINER_INPUTS | dict(kv_cache=built(_filled_cache), kv_cache_mode="inject"),
        carries_state=True,
    ),
    Case(
        "SanaWMLTX2RefinerTransformer@kv-capture",
        "SanaWMLTX2RefinerTransformer3DModel",
        REFINER,
        REFINER_INPUTS | dict(kv_cache=built(_filled_cache), kv_cache_mode="inject_and_capture_post_rope"),
        carries_state=True,
    ),
)
