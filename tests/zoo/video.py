"""LTX, LTX-2, Mochi, Allegro, Latte and MiniMax-H3."""

import torch

from .case import Case, full, integers, keep_first, randn, values

ALLEGRO = dict(
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    num_layers=4,
    cross_attention_dim=24,
    sample_width=8,
    sample_height=8,
    sample_frames=8,
    caption_channels=8,
)
ALLEGRO_INPUTS = dict(
    hidden_states=randn(2, 4, 2, 8, 8),
    encoder_hidden_states=randn(2, 16, 8),
    timestep=values([44, 239], torch.int64),
)
# Tables of cosines and sines per axis, and the table row of each token for each axis.
ALLEGRO_ROTARY = (
    tuple((randn(size, 4), randn(size, 4)) for size in (2, 4, 4)),
    tuple(integers(size, 1, 32) for size in (2, 4, 4)),
)

LATTE = dict(
    sample_size=8,
    num_layers=4,
    patch_size=2,
    attention_head_dim=4,
    num_attention_heads=2,
    caption_channels=8,
    in_channels=4,
    cross_attention_dim=8,
    out_channels=8,
    attention_bias=True,
    activation_fn="gelu-approximate",
    num_embeds_ada_norm=1000,
    norm_type="ada_norm_single",
    norm_elementwise_affine=False,
    norm_eps=1e-06,
    video_length=3,
)
LATTE_INPUTS = dict(
    hidden_states=randn(2, 4, 3, 8, 8),
    encoder_hidden_states=randn(2, 8, 8),
    timestep=values([44, 239], torch.int64),
    enable_temporal_attentions=True,
)

LTX = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=8,
    cross_attention_dim=16,
    num_layers=4,
    qk_norm="rms_norm_across_heads",
    caption_channels=16,
)
LTX_INPUTS = dict(
    hidden_states=randn(2, 128, 4),
    encoder_hidden_states=randn(2, 16, 16),
    timestep=values([44, 239], torch.int64),
    encoder_attention_mask=keep_first([16, 11], 16),
    num_frames=2,
    height=8,
    width=8,
)

LTX2 = LTX | dict(
    patch_size=1,
    patch_size_t=1,
    audio_in_channels=4,
    audio_out_channels=4,
    audio_num_attention_heads=2,
    audio_attention_head_dim=4,
    audio_cross_attention_dim=8,
    rope_double_precision=False,
)
LTX2_INPUTS = dict(
    hidden_states=randn(2, 128, 4),
    audio_hidden_states=randn(2, 9, 4),
    encoder_hidden_states=randn(2, 16, 16),
    audio_encoder_hidden_states=randn(2, 16, 16),
    timestep=full((2,), 500.0),
    encoder_attention_mask=full((2, 16), True, torch.bool),
    num_frames=2,
    height=8,
    width=8,
    audio_num_frames=9,
    fps=25.0,
)

MOCHI = dict(
    patch_size=2,
    num_attention_heads=2,
    attention_head_dim=8,
    num_layers=4,
    pooled_projection_dim=16,
    in_channels=4,
    out_channels=None,
    qk_norm="rms_norm",
    text_embed_dim=16,
    time_embed_dim=4,
    activation_fn="swiglu",
    max_sequence_length=16,
)
MOCHI_INPUTS = dict(
    hidden_states=randn(2, 4, 2, 16, 16),
    encoder_hidden_states=randn(2, 16, 16),
    timestep=values([44, 239], torch.int64),
    encoder_attention_mask=keep_first([16, 10], 16),
)

MINIMAX_H3 = dict(
    num_attention_heads=2,
    attention_head_dim=16,
    hidden_size=24,
    num_layers=4,
    num_refiner_layers=2,
    ffn_dim=32,
    in_channels=4,
    audio_in_channels=6,
    patch_size=(1, 2, 2),
    text_dim=8,
    freq_dim=8,
    time_embed_hidden_dim=24,
    time_embed_dim=16,
    rope_freq_dim=2,
)
# One sequence of 4 text, 6 audio and 8 video tokens, the last as 2 frames of 2 x 2.
MINIMAX_H3_INPUTS = dict(
    hidden_states=randn(2, 8, 16),
    audio_hidden_states=randn(2, 6, 6),
    encoder_hidden_states=randn(2, 4, 8),
    timestep=randn(2),
    timestep_indices=values([0] * 4 + [1] * 6 + [0] * 8, torch.int64),
    token_tags=values([1] * 4 + [2] * 6 + [0] * 8, torch.int64),
    position_ids=values(
        [[float(t), 0.0, 0.0] for t in range(10)]
        + [[float(10 + i), float(i % 2), float(i // 2 % 2)] for i in range(8)],
        torch.float32,
    ),
    video_indices=values(list(range(10, 18)), torch.int64),
    audio_indices=values(list(range(4, 10)), torch.int64),
    text_indices=values(list(range(4)), torch.int64),
)

CASES = (
    Case("AllegroTransformer", "AllegroTransformer3DModel", ALLEGRO, ALLEGRO_INPUTS),
    Case(
        "AllegroTransformer@mask",
        "AllegroTransformer3DModel",
        ALLEGRO,
        ALLEGRO_INPUTS
        | dict(
            attention_mask=full((2, 2, 8, 8), 1, torch.int64),
            encoder_attention_mask=keep_first([16, 9], 16, torch.int64),
            image_rotary_emb=ALLEGRO_ROTARY,
        ),
    ),
    Case("LatteTransformer", "LatteTransformer3DModel", LATTE, LATTE_INPUTS),
    Case(
        "LatteTransformer@image",
        "LatteTransformer3DModel",
        LATTE,
        LATTE_INPUTS | dict(enable_temporal_attentions=False),
        idle=frozenset({"temporal_transformer_blocks"}),
    ),
    Case("LTXTransformer", "LTXVideoTransformer3DModel", LTX, LTX_INPUTS),
    Case(
        "LTXTransformer@conditioned",
        "LTXVideoTransformer3DModel",
        LTX,
        # One timestep per token, and coordinates (frame, height, width) made by the caller.
        LTX_INPUTS
        | dict(
            timestep=values([[0] * 64 + [500] * 64] * 2, torch.int64),
            video_coords=randn(2, 3, 128),
            rope_interpolation_scale=(0.32, 32, 32),
        ),
    ),
    Case("LTX2Transformer", "LTX2VideoTransformer3DModel", LTX2, LTX2_INPUTS),
    Case(
        "LTX2Transformer@guided",
        "LTX2VideoTransformer3DModel",
        LTX2
        | dict(
            cross_attn_mod=True,
            audio_cross_attn_mod=True,
            gated_attn=True,
            audio_gated_attn=True,
            perturbed_attn=True,
            rope_type="split",
        ),
        LTX2_INPUTS
        | dict(
            timestep=values([[0.0] * 64 + [500.0] * 64] * 2, torch.float32),
            audio_timestep=full((2, 9), 500.0),
            sigma=full((2,), 500.0),
            encoder_attention_mask=keep_first([16, 11], 16, torch.int64),
            audio_encoder_attention_mask=keep_first([16, 11], 16, torch.int64),
            spatio_temporal_guidance_blocks=[2],
            perturbation_mask=values([0.0, 1.0], torch.float32),
            use_cross_timestep=True,
        ),
    ),
    Case(
        "LTX2Transformer@isolated",
        "LTX2VideoTransformer3DModel",
        LTX2,
        LTX2_INPUTS | dict(isolate_modalities=True),
    ),
    Case("MochiTransformer", "MochiTransformer3DModel", MOCHI, MOCHI_INPUTS),
    Case("MiniMaxH3Transformer", "MiniMaxH3Transformer3DModel", MINIMAX_H3, MINIMAX_H3_INPUTS),
)
