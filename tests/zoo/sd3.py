"""Stable Diffusion 3, AuraFlow and HiDream: image models with joint text and image blocks."""

import torch

from .case import Case, randn, values

SD3 = dict(
    sample_size=16,
    patch_size=1,
    in_channels=4,
    num_layers=4,
    attention_head_dim=8,
    num_attention_heads=4,
    caption_projection_dim=32,
    joint_attention_dim=32,
    pooled_projection_dim=64,
    out_channels=4,
    pos_embed_max_size=24,
    dual_attention_layers=(),
    qk_norm=None,
)
SD3_INPUTS = dict(
    hidden_states=randn(2, 4, 16, 16),
    encoder_hidden_states=randn(2, 20, 32),
    pooled_projections=randn(2, 64),
    timestep=values([44, 239], torch.int64),
)
SD35 = SD3 | dict(dual_attention_layers=(0,), qk_norm="rms_norm")

AURA = dict(
    sample_size=16,
    patch_size=2,
    in_channels=4,
    num_mmdit_layers=4,
    num_single_dit_layers=4,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=16,
    caption_projection_dim=32,
    out_channels=4,
    pos_embed_max_size=64,
)
AURA_INPUTS = dict(
    hidden_states=randn(2, 4, 16, 16),
    encoder_hidden_states=randn(2, 12, 16),
    timestep=values([0.3, 0.3], torch.float32),
)

HIDREAM = dict(
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=4,
    num_single_layers=4,
    attention_head_dim=8,
    num_attention_heads=4,
    caption_channels=(8, 4),
    text_emb_dim=8,
    num_routed_experts=2,
    num_activated_experts=2,
    axes_dims_rope=(4, 2, 2),
    max_resolution=(32, 32),
    llama_layers=(0, 1, 0, 1, 0, 1, 0, 1),
    force_inference_output=True,
)
HIDREAM_INPUTS = dict(
    hidden_states=randn(2, 4, 16, 16),
    encoder_hidden_states_t5=randn(2, 8, 8),
    encoder_hidden_states_llama3=randn(2, 2, 8, 4),
    pooled_embeds=randn(2, 8),
    timesteps=values([44, 239], torch.int64),
)

CASES = (
    Case("SD3Transformer", "SD3Transformer2DModel", SD3, SD3_INPUTS),
    Case("SD35Transformer", "SD3Transformer2DModel", SD35, SD3_INPUTS),
    Case(
        "SD3Transformer@controlnet",
        "SD3Transformer2DModel",
        SD3,
        SD3_INPUTS | dict(block_controlnet_hidden_states=[randn(2, 256, 32), randn(2, 256, 32)]),
    ),
    Case(
        "SD35Transformer@skip-layers",
        "SD3Transformer2DModel",
        SD35 | dict(num_layers=6, dual_attention_layers=(0, 1, 2)),
        SD3_INPUTS | dict(skip_layers=[1, 3]),
        idle=frozenset({"transformer_blocks.1", "transformer_blocks.3"}),
    ),
    Case("AuraFlowTransformer", "AuraFlowTransformer2DModel", AURA, AURA_INPUTS),
    Case(
        "AuraFlowTransformer@joint-only",
        "AuraFlowTransformer2DModel",
        AURA | dict(num_single_dit_layers=0),
        AURA_INPUTS,
    ),
    Case("HiDreamTransformer", "HiDreamImageTransformer2DModel", HIDREAM, HIDREAM_INPUTS),
    Case(
        "HiDreamTransformer@experts",
        "HiDreamImageTransformer2DModel",
        HIDREAM | dict(num_routed_experts=4, num_activated_experts=2),
        HIDREAM_INPUTS | dict(hidden_states=randn(2, 4, 16, 8)),
    ),
)
