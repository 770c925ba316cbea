"""CogVideoX, CogView, ConsisID, GLM-Image and EasyAnimate."""

import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

from .case import Case, built, full, integers, keep_first, randn, values

VIDEOX = dict(
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    time_embed_dim=2,
    text_embed_dim=8,
    num_layers=4,
    sample_width=8,
    sample_height=8,
    sample_frames=8,
    patch_size=2,
    temporal_compression_ratio=4,
    max_text_seq_length=8,
)
VIDEOX_INPUTS = dict(
    hidden_states=randn(2, 1, 4, 8, 8),
    encoder_hidden_states=randn(2, 8, 8),
    timestep=values([44, 239], torch.int64),
)
VIDEOX15 = VIDEOX | dict(patch_size_t=2, use_rotary_positional_embeddings=True)
VIDEOX15_INPUTS = VIDEOX_INPUTS | dict(hidden_states=randn(2, 2, 4, 8, 8))

CONSISID = VIDEOX | dict(
    cross_attn_interval=1,
    is_kps=False,
    is_train_face=True,
    cross_attn_dim_head=1,
    cross_attn_num_heads=1,
    LFE_id_dim=2,
    LFE_vit_dim=2,
    LFE_depth=5,
    LFE_dim_head=8,
    LFE_num_heads=2,
    LFE_num_id_token=1,
    LFE_num_querie=1,
    LFE_output_dim=10,
    LFE_ff_mult=1,
    LFE_num_scale=1,
)
CONSISID_INPUTS = VIDEOX_INPUTS | dict(id_vit_hidden=[randn(2, 2, 2)], id_cond=randn(2, 2))

VIEW3 = dict(
    patch_size=2,
    in_channels=4,
    num_layers=4,
    attention_head_dim=4,
    num_attention_heads=2,
    out_channels=4,
    text_embed_dim=8,
    time_embed_dim=8,
    condition_dim=2,
    pos_embed_max_size=8,
    sample_size=8,
)
VIEW3_INPUTS = dict(
    hidden_states=randn(2, 4, 8, 8),
    encoder_hidden_states=randn(2, 8, 8),
    original_size=full((2, 2), 64, torch.int64),
    target_size=full((2, 2), 64, torch.int64),
    crop_coords=full((2, 2), 0, torch.int64),
    timestep=values([44, 239], torch.int64),
)
VIEW4 = VIEW3 | dict(attention_head_dim=8, rope_axes_dim=(8, 8))

GLM = dict(
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=4,
    attention_head_dim=8,
    num_attention_heads=2,
    text_embed_dim=8,
    time_embed_dim=8,
    condition_dim=2,
    prior_vq_quantizer_codebook_size=64,
)
# The second sample drops its prior tokens, as the unconditional branch does.
GLM_INPUTS = dict(
    hidden_states=randn(2, 4, 8, 8),
    encoder_hidden_states=randn(2, 6, 8),
    prior_token_id=integers(64, 2, 16),
    prior_token_drop=values([[False] * 16, [True] * 16], torch.bool),
    timestep=full((2,), 500.0),
    target_size=full((2, 2), 64.0),
    crop_coords=full((2, 2), 0.0),
)

EASY_ANIMATE = dict(
    attention_head_dim=16,
    num_attention_heads=2,
    in_channels=4,
    mmdit_layers=4,
    num_layers=4,
    out_channels=4,
    patch_size=2,
    sample_height=60,
    sample_width=90,
    text_embed_dim=16,
    time_embed_dim=8,
    time_position_encoding_type="3d_rope",
    timestep_activation_fn="silu",
)
EASY_ANIMATE_INPUTS = dict(
    hidden_states=randn(2, 4, 2, 16, 16),
    timestep=values([44, 239], torch.int64),
    timestep_cond=None,
    encoder_hidden_states=randn(2, 16, 16),
    encoder_hidden_states_t5=None,
    inpaint_latents=None,
    control_latents=None,
)


def _glm_cache(mode: str, filled: bool, generator: torch.Generator) -> GlmImageKVCache:
    cache = GlmImageKVCache(num_layers=4)
    for layer in cache.caches if filled else ():
        layer.store(torch.randn(1, 16, 2, 8, generator=generator), torch.randn(1, 16, 2, 8, generator=generator))
    cache.set_mode(mode)
    return cache


CASES = (
    Case("CogVideoXTransformer", "CogVideoXTransformer3DModel", VIDEOX, VIDEOX_INPUTS),
    Case("CogVideoX15Transformer", "CogVideoXTransformer3DModel", VIDEOX15, VIDEOX15_INPUTS),
    Case(
        "CogVideoX15Transformer@i2v",
        "CogVideoXTransformer3DModel",
        VIDEOX15 | dict(in_channels=8, ofs_embed_dim=2),
        VIDEOX15_INPUTS
        | dict(
            hidden_states=randn(2, 2, 8, 8, 8),
            ofs=full((1,), 2.0),
            image_rotary_emb=(randn(16, 8), randn(16, 8)),
        ),
    ),
    Case("ConsisIDTransformer", "ConsisIDTransformer3DModel", CONSISID, CONSISID_INPUTS),
    Case(
        "ConsisIDTransformer@rope",
        "ConsisIDTransformer3DModel",
        CONSISID | dict(use_rotary_positional_embeddings=True, cross_attn_interval=2),
        CONSISID_INPUTS | dict(image_rotary_emb=(randn(16, 8), randn(16, 8))),
    ),
    Case("CogView3PlusTransformer", "CogView3PlusTransformer2DModel", VIEW3, VIEW3_INPUTS),
    Case("CogView4Transformer", "CogView4Transformer2DModel", VIEW4, VIEW3_INPUTS),
    Case(
        "CogView4Transformer@mask",
        "CogView4Transformer2DModel",
        VIEW4,
        VIEW3_INPUTS | dict(attention_mask=keep_first([8, 5], 8, torch.float32)),
    ),
    Case("GlmImageTransformer", "GlmImageTransformer2DModel", GLM, GLM_INPUTS),
    Case(
        "GlmImageTransformer@kv-write",
        "GlmImageTransformer2DModel",
        GLM,
        # The condition image is encoded without any text token.
        GLM_INPUTS
        | dict(
            hidden_states=randn(1, 4, 8, 8),
            encoder_hidden_states=randn(1, 0, 8),
            prior_token_id=integers(64, 1, 16),
            prior_token_drop=full((1, 16), False, torch.bool),
            timestep=full((1,), 0.0),
            target_size=full((1, 2), 64.0),
            crop_coords=full((1, 2), 0.0),
            kv_caches=built(lambda generator: _glm_cache("write", False, generator)),
        ),
        carries_state=True,
    ),
    Case(
        "GlmImageTransformer@kv-read",
        "GlmImageTransformer2DModel",
        GLM,
        GLM_INPUTS | dict(kv_caches=built(lambda generator: _glm_cache("read", True, generator))),
        carries_state=True,
    ),
    Case("EasyAnimateTransformer", "EasyAnimateTransformer3DModel", EASY_ANIMATE, EASY_ANIMATE_INPUTS),
    Case(
        "EasyAnimateTransformer@control",
        "EasyAnimateTransformer3DModel",
        EASY_ANIMATE | dict(in_channels=12, mmdit_layers=2, text_embed_dim_t5=12, after_norm=True),
        EASY_ANIMATE_INPUTS
        | dict(
            encoder_hidden_states_t5=randn(2, 5, 12),
            inpaint_latents=randn(2, 4, 2, 16, 16),
            control_latents=randn(2, 4, 2, 16, 16),
        ),
    ),
)
