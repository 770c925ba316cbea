"""Lumina, Z-Image and OmniGen: one stream of text and image tokens, with refiner blocks before it."""

import torch

from .case import Case, full, keep_first, randn, values

LUMINA_NEXT = dict(
    sample_size=16,
    patch_size=2,
    in_channels=4,
    hidden_size=24,
    num_layers=4,
    num_attention_heads=3,
    num_kv_heads=1,
    multiple_of=16,
    ffn_dim_multiplier=None,
    norm_eps=1e-05,
    learn_sigma=False,
    qk_norm=True,
    cross_attention_dim=32,
    scaling_factor=1.0,
)
LUMINA_NEXT_INPUTS = dict(
    hidden_states=randn(2, 4, 16, 16),
    encoder_hidden_states=randn(2, 16, 32),
    timestep=full((2,), 0.4),
    encoder_mask=keep_first([16, 11], 16, torch.int64),
    image_rotary_emb=randn(384, 384, 4),
    cross_attention_kwargs={},
)

LUMINA2 = dict(
    sample_size=16,
    patch_size=2,
    in_channels=4,
    hidden_size=24,
    num_layers=4,
    num_refiner_layers=2,
    num_attention_heads=3,
    num_kv_heads=1,
    multiple_of=2,
    ffn_dim_multiplier=None,
    norm_eps=1e-05,
    scaling_factor=1.0,
    axes_dim_rope=(4, 2, 2),
    axes_lens=(128, 128, 128),
    cap_feat_dim=32,
)
LUMINA2_INPUTS = dict(
    hidden_states=randn(2, 4, 16, 16),
    encoder_hidden_states=randn(2, 16, 32),
    timestep=full((2,), 0.4),
    encoder_attention_mask=full((2, 16), True, torch.bool),
)

Z_IMAGE = dict(
    all_patch_size=(2,),
    all_f_patch_size=(1,),
    in_channels=16,
    dim=16,
    n_layers=4,
    n_refiner_layers=2,
    n_heads=1,
    n_kv_heads=2,
    qk_norm=True,
    cap_feat_dim=16,
    rope_theta=256.0,
    t_scale=1000.0,
    axes_dims=(8, 4, 4),
    axes_lens=(256, 32, 32),
)
Z_IMAGE_INPUTS = dict(x=[randn(16, 1, 16, 16)], cap_feats=[randn(16, 16)], t=full((1,), 0.3))

OMNIGEN = dict(
    hidden_size=16,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=32,
    num_layers=4,
    pad_token_id=0,
    vocab_size=100,
    in_channels=4,
    time_step_dim=4,
    rope_scaling={"long_factor": [1, 2], "short_factor": [1, 2]},
)
# 24 text tokens, of which the first 16 are an input image, one time token and 16 tokens of the image to paint.
OMNIGEN_INPUTS = dict(
    hidden_states=randn(2, 4, 8, 8),
    timestep=full((2,), 0.4),
    input_ids=values(
        [
            [4, 9, 3, 0, 3, 9, 7, 3, 7, 3, 1, 6, 6, 9, 8, 6, 6, 8, 4, 3, 6, 9, 1, 4],
            [4, 1, 9, 9, 9, 0, 1, 2, 3, 0, 5, 5, 2, 9, 1, 8, 8, 3, 6, 9, 1, 7, 3, 5],
        ],
        torch.int64,
    ),
    input_img_latents=[randn(1, 4, 8, 8)],
    input_image_sizes={0: [[0, 16]]},
    attention_mask=full((2, 41, 41), 1.0),
    position_ids=values([list(range(41))] * 2, torch.int64),
)

CASES = (
    Case("LuminaNextDiT", "LuminaNextDiT2DModel", LUMINA_NEXT, LUMINA_NEXT_INPUTS),
    Case("Lumina2Transformer", "Lumina2Transformer2DModel", LUMINA2, LUMINA2_INPUTS),
    Case(
        "Lumina2Transformer@mask",
        "Lumina2Transformer2DModel",
        LUMINA2,
        LUMINA2_INPUTS | dict(encoder_attention_mask=keep_first([16, 9], 16)),
    ),
    Case("ZImageTransformer", "ZImageTransformer2DModel", Z_IMAGE, Z_IMAGE_INPUTS),
    Case(
        "ZImageTransformer@batch",
        "ZImageTransformer2DModel",
        Z_IMAGE,
        # Two texts of unlike length, each padded to a multiple of 32.
        dict(
            x=[randn(16, 1, 16, 16), randn(16, 1, 16, 16)],
            cap_feats=[randn(16, 16), randn(40, 16)],
            t=full((2,), 0.3),
        ),
    ),
    Case(
        "ZImageTransformer@controlnet",
        "ZImageTransformer2DModel",
        Z_IMAGE,
        # Residuals of the joint sequence: 64 image tokens, 16 text tokens padded to 32.
        Z_IMAGE_INPUTS | dict(controlnet_block_samples={0: randn(1, 96, 16), 2: randn(1, 96, 16)}),
    ),
    Case(
        "ZImageTransformer@omni",
        "ZImageTransformer2DModel",
        Z_IMAGE | dict(siglip_feat_dim=12),
        # One clean reference image before the noisy one; a text and a feature map for each.
        dict(
            x=[[randn(16, 1, 16, 16), randn(16, 1, 16, 16)]],
            cap_feats=[[randn(16, 16), randn(12, 16)]],
            siglip_feats=[[randn(4, 4, 12), None]],
            image_noise_mask=[[0, 1]],
            t=full((1,), 0.3),
        ),
    ),
    Case("OmniGenTransformer", "OmniGenTransformer2DModel", OMNIGEN, OMNIGEN_INPUTS),
)
