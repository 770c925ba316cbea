"""The first transformers of diffusers: DiT, PixArt, Transformer2DModel, temporal transformer; and DreamLite."""

import torch

from .case import Case, full, integers, keep_first, randn, values

DIT = dict(
    in_channels=4,
    out_channels=8,
    activation_fn="gelu-approximate",
    num_attention_heads=2,
    attention_head_dim=4,
    attention_bias=True,
    num_layers=4,
    norm_type="ada_norm_zero",
    num_embeds_ada_norm=8,
    patch_size=2,
    sample_size=8,
)
DIT_INPUTS = dict(
    hidden_states=randn(4, 4, 8, 8),
    timestep=values([44, 239, 933, 760], torch.int64),
    class_labels=values([0, 3, 1, 0], torch.int64),
)

PIXART = dict(
    sample_size=8,
    num_layers=4,
    patch_size=2,
    attention_head_dim=4,
    num_attention_heads=2,
    in_channels=4,
    cross_attention_dim=8,
    out_channels=8,
    attention_bias=True,
    activation_fn="gelu-approximate",
    num_embeds_ada_norm=8,
    norm_type="ada_norm_single",
    norm_elementwise_affine=False,
    norm_eps=1e-06,
    use_additional_conditions=False,
    caption_channels=None,
)
PIXART_INPUTS = dict(
    hidden_states=randn(4, 4, 8, 8),
    timestep=values([44, 239, 933, 760], torch.int64),
    encoder_hidden_states=randn(4, 8, 8),
    added_cond_kwargs={"aspect_ratio": None, "resolution": None},
)

CONTINUOUS = dict(
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=8,
    num_layers=4,
    norm_num_groups=2,
    cross_attention_dim=12,
)
CONTINUOUS_INPUTS = dict(hidden_states=randn(2, 8, 8, 8), encoder_hidden_states=randn(2, 6, 12))

CASES = (
    Case("DiTTransformer2D", "DiTTransformer2DModel", DIT, DIT_INPUTS),
    Case("PixArtTransformer2D", "PixArtTransformer2DModel", PIXART, PIXART_INPUTS),
    Case(
        "PixArtTransformer2D@alpha",
        "PixArtTransformer2DModel",
        PIXART
        | dict(use_additional_conditions=True, caption_channels=10, attention_head_dim=6, cross_attention_dim=12),
        PIXART_INPUTS
        | dict(
            encoder_hidden_states=randn(4, 6, 10),
            encoder_attention_mask=keep_first([6, 4, 5, 3], 6, torch.int64),
            added_cond_kwargs={"resolution": full((4, 2), 64.0), "aspect_ratio": full((4, 1), 1.0)},
        ),
    ),
    Case("Transformer2D", "Transformer2DModel", CONTINUOUS, CONTINUOUS_INPUTS),
    Case(
        "Transformer2D@linear-mask",
        "Transformer2DModel",
        CONTINUOUS | dict(use_linear_projection=True, attention_bias=True),
        CONTINUOUS_INPUTS | dict(encoder_attention_mask=keep_first([6, 4], 6, torch.int64)),
    ),
    Case(
        "Transformer2D@patches",
        "Transformer2DModel",
        DIT,
        DIT_INPUTS,
    ),
    Case(
        "Transformer2D@tokens",
        "Transformer2DModel",
        dict(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=4,
            sample_size=4,
            num_vector_embeds=12,
            num_embeds_ada_norm=100,
            norm_type="ada_norm",
            cross_attention_dim=12,
        ),
        dict(
            hidden_states=integers(12, 1, 16),
            encoder_hidden_states=randn(1, 6, 12),
            timestep=values(44, torch.int64),
        ),
    ),
    Case(
        "TemporalTransformer",
        "TransformerTemporalModel",
        dict(num_attention_heads=4, attention_head_dim=4, in_channels=4, num_layers=4, norm_num_groups=1),
        dict(hidden_states=randn(6, 4, 8, 8), timestep=values([44, 239], torch.int64), num_frames=3),
    ),
    Case(
        "DreamLiteTransformer2D",
        "DreamLiteTransformer2DModel",
        CONTINUOUS | dict(use_linear_projection=True),
        CONTINUOUS_INPUTS,
    ),
    Case(
        "DreamLiteTransformer2D@cross-only-mask",
        "DreamLiteTransformer2DModel",
        CONTINUOUS | dict(use_self_attention=False, qk_norm="rms_norm", ff_mult=2),
        CONTINUOUS_INPUTS | dict(encoder_attention_mask=keep_first([6, 4], 6)),
    ),
)
