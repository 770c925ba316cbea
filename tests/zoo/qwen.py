"""Qwen-Image and its relatives."""

import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

from .case import Case, built, full, keep_first, randn, values

QWEN = dict(
    patch_size=2,
    in_channels=16,
    out_channels=4,
    num_layers=4,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=16,
    guidance_embeds=False,
    axes_dims_rope=(8, 4, 4),
)
QWEN_INPUTS = dict(
    hidden_states=randn(1, 16, 16),
    encoder_hidden_states=randn(1, 8, 16),
    encoder_hidden_states_mask=full((1, 8), 1, torch.int64),
    timestep=full((1,), 1.0),
    img_shapes=[(1, 4, 4)],
)
# The image to paint and one image to look at, 16 tokens each.
QWEN_EDIT_INPUTS = QWEN_INPUTS | dict(hidden_states=randn(1, 32, 16), img_shapes=[[(1, 4, 4), (1, 4, 4)]])

NUCLEUS = {name: value for name, value in QWEN.items() if name != "guidance_embeds"} | dict(
    moe_enabled=False, capacity_factors=[8.0, 8.0, 8.0, 8.0]
)
NUCLEUS_MOE = NUCLEUS | dict(moe_enabled=True, num_experts=4, moe_intermediate_dim=16)

QWEN21 = dict(
    in_channels=4,
    out_channels=4,
    num_layers=4,
    attention_head_dim=16,
    num_attention_heads=2,
    context_in_dim=32,
    axes_dims_rope=(4, 6, 6),
)
# An image slot of the text sequence stands for 4 image tokens.
QWEN21_INPUTS = dict(
    hidden_states=randn(1, 16, 4),
    encoder_hidden_states=randn(1, 6, 32),
    timestep=full((1,), 0.5),
    img_shapes=[[(1, 4, 4)]],
    img_mask=values([[False] * 6 + [True] * 4], torch.bool),
)
# 3 text tokens, an image to look at, 3 text tokens: a prefix of 22 tokens before the 16 of the image to paint.
QWEN21_EDIT_INPUTS = dict(
    hidden_states=randn(1, 32, 4),
    encoder_hidden_states=randn(1, 10, 32),
    timestep=full((1,), 0.5),
    img_shapes=[[(1, 4, 4), (1, 4, 4)]],
    img_mask=values([[False] * 3 + [True] * 4 + [False] * 3 + [True] * 4], torch.bool),
)


def _filled_cache(generator: torch.Generator) -> QwenImage21KVCache:
    cache = QwenImage21KVCache(4)
    for layer in cache.layer_caches:
        layer.store(torch.randn(1, 22, 2, 16, generator=generator), torch.randn(1, 22, 2, 16, generator=generator))
    return cache


CASES = (
    Case("QwenImageTransformer", "QwenImageTransformer2DModel", QWEN, QWEN_INPUTS),
    Case(
        "QwenImageTransformer@controlnet",
        "QwenImageTransformer2DModel",
        QWEN,
        QWEN_INPUTS | dict(controlnet_block_samples=[randn(1, 16, 64), randn(1, 16, 64)]),
    ),
    Case(
        "QwenImageTransformer@batch-mask",
        "QwenImageTransformer2DModel",
        QWEN,
        dict(
            hidden_states=randn(2, 16, 16),
            encoder_hidden_states=randn(2, 8, 16),
            encoder_hidden_states_mask=keep_first([8, 5], 8, torch.int64),
            timestep=full((2,), 0.6),
            img_shapes=[[(1, 4, 4)], [(1, 4, 4)]],
        ),
    ),
    Case("QwenImageTransformer@edit", "QwenImageTransformer2DModel", QWEN, QWEN_EDIT_INPUTS),
    Case(
        "QwenImageTransformer@edit-zero-cond-t",
        "QwenImageTransformer2DModel",
        QWEN | dict(zero_cond_t=True),
        QWEN_EDIT_INPUTS,
    ),
    Case(
        "QwenImageTransformer@layered",
        "QwenImageTransformer2DModel",
        QWEN | dict(use_additional_t_cond=True, use_layer3d_rope=True),
        QWEN_INPUTS
        | dict(
            hidden_states=randn(1, 48, 16),
            img_shapes=[[(1, 4, 4), (1, 4, 4), (1, 4, 4)]],
            additional_t_cond=full((1,), 0, torch.int64),
        ),
    ),
    Case("NucleusMoEImageTransformer", "NucleusMoEImageTransformer2DModel", NUCLEUS, QWEN_INPUTS),
    Case("NucleusMoEImageTransformer@moe", "NucleusMoEImageTransformer2DModel", NUCLEUS_MOE, QWEN_INPUTS),
    Case("QwenImage21Transformer2DModel", "QwenImage21Transformer2DModel", QWEN21, QWEN21_INPUTS),
    Case("QwenImage21Transformer2DModel@edit", "QwenImage21Transformer2DModel", QWEN21, QWEN21_EDIT_INPUTS),
    Case(
        "QwenImage21Transformer2DModel@batch-mask",
        "QwenImage21Transformer2DModel",
        QWEN21,
        QWEN21_INPUTS
        | dict(
            hidden_states=randn(2, 16, 4),
            encoder_hidden_states=randn(2, 6, 32),
            encoder_hidden_states_mask=keep_first([6, 4], 6),
            img_shapes=[[(1, 4, 4)], [(1, 4, 4)]],
            img_mask=values([[False] * 6 + [True] * 4] * 2, torch.bool),
            timestep=full((2,), 0.5),
        ),
    ),
    Case(
        "QwenImage21Transformer2DModel@kv-extract",
        "QwenImage21Transformer2DModel",
        QWEN21,
        QWEN21_EDIT_INPUTS | dict(kv_cache=built(lambda _: QwenImage21KVCache(4)), kv_cache_mode="extract"),
        carries_state=True,
    ),
    Case(
        "QwenImage21Transformer2DModel@kv-cached",
        "QwenImage21Transformer2DModel",
        QWEN21,
        QWEN21_EDIT_INPUTS | dict(kv_cache=built(_filled_cache), kv_cache_mode="cached"),
        carries_state=True,
    ),
)
