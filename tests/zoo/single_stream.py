"""Image models without a common ancestor: PRX, Ideogram 4, JoyImage, Krea 2 and ERNIE-Image."""

import torch

from .case import Case, built, full, keep_first, randn, values

PRX = dict(
    in_channels=16,
    patch_size=2,
    context_in_dim=20,
    hidden_size=32,
    mlp_ratio=2.0,
    num_heads=2,
    depth=4,
    axes_dim=(8, 8),
    theta=10000,
)
PRX_INPUTS = dict(
    hidden_states=randn(1, 16, 8, 8),
    encoder_hidden_states=randn(1, 10, 20),
    timestep=full((1,), 1.0),
)

IDEOGRAM4 = dict(
    in_channels=16,
    num_layers=4,
    attention_head_dim=8,
    num_attention_heads=4,
    intermediate_size=32,
    adaln_dim=16,
    llm_features_dim=24,
    rope_theta=10000,
    mrope_section=(2, 1, 1),
    norm_eps=1e-05,
)
# 4 text tokens (indicator 3), then an image of 2 x 2 tokens (indicator 2) whose positions start at 65536.
IDEOGRAM4_INPUTS = dict(
    hidden_states=randn(1, 8, 16),
    encoder_hidden_states=randn(1, 8, 24),
    timestep=full((1,), 0.5),
    position_ids=values(
        [[[i, i, i] for i in range(4)] + [[65536, 65536 + i // 2, 65536 + i % 2] for i in range(4)]], torch.int64
    ),
    segment_ids=full((1, 8), 1, torch.int64),
    indicator=values([[3, 3, 3, 3, 2, 2, 2, 2]], torch.int64),
)

JOY = dict(
    patch_size=(1, 2, 2),
    in_channels=16,
    hidden_size=32,
    num_attention_heads=2,
    text_dim=16,
    num_layers=4,
    rope_dim_list=(4, 6, 6),
    theta=256,
)
JOY_INPUTS = dict(hidden_states=randn(1, 16, 1, 4, 4), encoder_hidden_states=randn(1, 12, 16), timestep=full((1,), 1.0))
# Patches of two images, 4 and 2 of them; the model receives patches, not images.
JOY_PLUS_INPUTS = dict(
    hidden_states=randn(1, 6, 16, 1, 2, 2),
    encoder_hidden_states=randn(1, 12, 16),
    timestep=full((1,), 1.0),
    shape_list=[[(1, 2, 2), (1, 1, 2)]],
)

KREA2 = dict(
    in_channels=4,
    num_layers=4,
    attention_head_dim=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    timestep_embed_dim=16,
    text_hidden_dim=12,
    num_text_layers=3,
    text_num_attention_heads=2,
    text_num_key_value_heads=2,
    text_intermediate_size=16,
    num_layerwise_text_blocks=2,
    num_refiner_text_blocks=2,
    axes_dims_rope=(4, 2, 2),
)


def _krea2_ids(_: torch.Generator) -> torch.Tensor:
    image = torch.cartesian_prod(torch.arange(1), torch.arange(4), torch.arange(4))
    return torch.cat([torch.zeros(6, 3, dtype=torch.int64), image])


KREA2_INPUTS = dict(
    hidden_states=randn(2, 16, 4),
    encoder_hidden_states=randn(2, 6, 3, 12),
    timestep=full((2,), 0.6),
    position_ids=built(_krea2_ids),
)

ERNIE = dict(
    hidden_size=16,
    num_attention_heads=2,
    num_layers=4,
    ffn_hidden_size=24,
    in_channels=4,
    out_channels=4,
    patch_size=1,
    text_in_dim=12,
    rope_axes_dim=(4, 2, 2),
)
ERNIE_INPUTS = dict(
    hidden_states=randn(2, 4, 4, 4),
    timestep=full((2,), 500.0),
    text_bth=randn(2, 6, 12),
    text_lens=values([6, 4], torch.int64),
)

CASES = (
    Case("PRXTransformer", "PRXTransformer2DModel", PRX, PRX_INPUTS),
    Case(
        "PRXTransformer@batch-mask",
        "PRXTransformer2DModel",
        PRX,
        dict(
            hidden_states=randn(2, 16, 8, 8),
            encoder_hidden_states=randn(2, 10, 20),
            timestep=full((2,), 0.4),
            attention_mask=keep_first([10, 7], 10),
        ),
    ),
    Case("Ideogram4Transformer", "Ideogram4Transformer2DModel", IDEOGRAM4, IDEOGRAM4_INPUTS),
    Case("JoyImageEditTransformer", "JoyImageEditTransformer3DModel", JOY, JOY_INPUTS),
    Case("JoyImageEditPlusTransformer", "JoyImageEditPlusTransformer3DModel", JOY, JOY_PLUS_INPUTS),
    Case(
        "JoyImageEditPlusTransformer@batch-mask",
        "JoyImageEditPlusTransformer3DModel",
        JOY,
        dict(
            hidden_states=randn(2, 6, 16, 1, 2, 2),
            encoder_hidden_states=randn(2, 12, 16),
            encoder_hidden_states_mask=keep_first([12, 8], 12),
            timestep=full((2,), 1.0),
            shape_list=[[(1, 2, 2), (1, 1, 2)], [(1, 2, 2), (1, 1, 2)]],
        ),
    ),
    Case("Krea2Transformer", "Krea2Transformer2DModel", KREA2, KREA2_INPUTS),
    Case(
        "Krea2Transformer@mask",
        "Krea2Transformer2DModel",
        KREA2,
        KREA2_INPUTS | dict(encoder_attention_mask=keep_first([6, 4], 6)),
    ),
    Case("ErnieImageTransformer", "ErnieImageTransformer2DModel", ERNIE, ERNIE_INPUTS),
)
