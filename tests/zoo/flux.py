"""FLUX and its relatives: double-stream blocks, then single-stream blocks."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2KVCache

from .case import Case, built, full, grid_ids, keep_first, randn, values, without

FLUX = dict(
    patch_size=1,
    in_channels=4,
    num_layers=4,
    num_single_layers=4,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    axes_dims_rope=(4, 4, 8),
)
FLUX_INPUTS = dict(
    hidden_states=randn(1, 16, 4),
    encoder_hidden_states=randn(1, 48, 32),
    pooled_projections=randn(1, 32),
    img_ids=grid_ids(1, 4, 4, dtype=torch.float32),
    txt_ids=full((48, 3), 0.0),
    timestep=full((1,), 1.0),
)
CONTROLNET = dict(
    controlnet_block_samples=[randn(1, 16, 32), randn(1, 16, 32)],
    controlnet_single_block_samples=[randn(1, 16, 32), randn(1, 16, 32)],
)

OVIS = without(FLUX, "pooled_projection_dim") | dict(out_channels=4)
CHROMA = without(FLUX, "pooled_projection_dim") | dict(
    approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1
)
CHROMA_INPUTS = without(FLUX_INPUTS, "pooled_projections")

FLUX2 = dict(
    patch_size=1,
    in_channels=4,
    num_layers=4,
    num_single_layers=4,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    timestep_guidance_channels=256,
    axes_dims_rope=(4, 4, 4, 4),
)
FLUX2_INPUTS = dict(
    hidden_states=randn(1, 16, 4),
    encoder_hidden_states=randn(1, 48, 32),
    img_ids=grid_ids(1, 4, 4, 1, batch=1),
    txt_ids=grid_ids(1, 1, 1, 48, batch=1),
    timestep=full((1,), 1.0),
    guidance=full((1,), 1.0),
)
# One reference image of 4 tokens at time 10 before the 16 image tokens.
FLUX2_REFERENCE = FLUX2_INPUTS | dict(
    hidden_states=randn(1, 20, 4),
    img_ids=built(lambda _: torch.cat([_flux2_ids(10, 2, 2), _flux2_ids(0, 4, 4)]).unsqueeze(0)),
)

FLUX3 = dict(
    in_channels=4,
    cond_in_channels=4,
    num_layers=4,
    num_single_layers=4,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    timestep_channels=32,
    axes_dims_rope=(4, 4, 4, 4),
)
FLUX3_INPUTS = dict(
    hidden_states=randn(2, 16, 4),
    encoder_hidden_states=randn(2, 12, 32),
    timestep=full((2,), 0.7),
    img_ids=grid_ids(1, 4, 4, 1),
    txt_ids=grid_ids(1, 1, 1, 12),
)
FLUX3_NO_IMAGE = frozenset({"mode_blocks.image_cond"})

BRIA = FLUX | dict(pooled_projection_dim=None)
BRIA_FIBO = dict(
    patch_size=1,
    in_channels=48,
    num_layers=4,
    num_single_layers=4,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=64,
    text_encoder_dim=32,
    pooled_projection_dim=None,
    axes_dims_rope=(0, 4, 4),
)
BRIA_FIBO_INPUTS = dict(
    hidden_states=randn(1, 64, 48),
    encoder_hidden_states=randn(1, 32, 64),
    img_ids=grid_ids(1, 8, 8, dtype=torch.float32),
    txt_ids=full((32, 3), 0.0),
    timestep=full((1,), 1.0),
    text_encoder_layers=[randn(1, 32, 32) for _ in range(8)],
)

BRIA_FIBO2 = dict(
    in_channels=4,
    patch_size=2,
    dim=32,
    n_layers=6,
    n_refiner_layers=2,
    n_heads=2,
    cap_feat_dim=16,
    injection_layer_ids=(1, 3),
    perceiver_num_layers=1,
    min_num_gist_tokens=4,
    max_num_gist_tokens=8,
    gist_step=2,
    gist_min_text_len=4,
    gist_max_text_len=32,
    axes_dims=(4, 6, 6),
    axes_lens=(64, 64, 64),
)
BRIA_FIBO2_INPUTS = dict(
    hidden_states=randn(2, 4, 16, 16),
    timestep=full((2,), 0.5),
    encoder_hidden_states=randn(2, 3, 10, 16),
    encoder_attention_mask=keep_first([8, 8], 10),
)


def _flux2_ids(time: int, height: int, width: int) -> torch.Tensor:
    axes = (torch.tensor([time]), torch.arange(height), torch.arange(width), torch.arange(1))
    return torch.cartesian_prod(*axes)


def _flux2_filled_cache(generator: torch.Generator) -> Any:
    cache = Flux2KVCache(num_double_layers=4, num_single_layers=4)
    cache.num_ref_tokens = 4
    for layer in (*cache.double_block_caches, *cache.single_block_caches):
        layer.store(torch.randn(1, 4, 2, 16, generator=generator), torch.randn(1, 4, 2, 16, generator=generator))
    return cache


CASES = (
    Case("FluxTransformer", "FluxTransformer2DModel", FLUX, FLUX_INPUTS),
    Case("FluxTransformer@controlnet", "FluxTransformer2DModel", FLUX, FLUX_INPUTS | CONTROLNET),
    Case(
        "FluxTransformer@controlnet-repeat",
        "FluxTransformer2DModel",
        FLUX,
        FLUX_INPUTS | CONTROLNET | dict(controlnet_blocks_repeat=True),
    ),
    Case(
        "FluxTransformer@guidance-batch",
        "FluxTransformer2DModel",
        FLUX | dict(guidance_embeds=True),
        FLUX_INPUTS
        | dict(
            hidden_states=randn(2, 16, 4),
            encoder_hidden_states=randn(2, 48, 32),
            pooled_projections=randn(2, 32),
            timestep=full((2,), 0.6),
            guidance=full((2,), 3.5),
            joint_attention_kwargs={},
        ),
    ),
    Case("ChromaTransformer", "ChromaTransformer2DModel", CHROMA, CHROMA_INPUTS),
    Case(
        "ChromaTransformer@mask",
        "ChromaTransformer2DModel",
        CHROMA,
        CHROMA_INPUTS | dict(attention_mask=values([[True] * 40 + [False] * 8 + [True] * 16], torch.bool)),
    ),
    Case("ChromaTransformer@controlnet", "ChromaTransformer2DModel", CHROMA, CHROMA_INPUTS | CONTROLNET),
    Case(
        "LongCatImageTransformer",
        "LongCatImageTransformer2DModel",
        FLUX,
        CHROMA_INPUTS | dict(guidance=full((1,), 3.5)),
    ),
    Case("OvisImageTransformer", "OvisImageTransformer2DModel", OVIS, CHROMA_INPUTS),
    Case("BriaTransformer", "BriaTransformer2DModel", BRIA, FLUX_INPUTS),
    Case(
        "BriaTransformer@controlnet",
        "BriaTransformer2DModel",
        BRIA,
        # Residuals of the single-stream blocks need no more text than image tokens, or they would be added to nothing.
        FLUX_INPUTS | without(CONTROLNET, "controlnet_single_block_samples"),
    ),
    Case("BriaFiboTransformer", "BriaFiboTransformer2DModel", BRIA_FIBO, BRIA_FIBO_INPUTS),
    Case("BriaFibo2Transformer2DModel", "BriaFibo2Transformer2DModel", BRIA_FIBO2, BRIA_FIBO2_INPUTS),
    Case("Flux2Transformer", "Flux2Transformer2DModel", FLUX2, FLUX2_INPUTS),
    Case("Flux2TransformerKVCache", "Flux2Transformer2DModel", FLUX2, FLUX2_REFERENCE),
    Case(
        "Flux2Transformer@kv-extract",
        "Flux2Transformer2DModel",
        FLUX2,
        FLUX2_REFERENCE | dict(kv_cache_mode="extract", num_ref_tokens=4),
        carries_state=True,
    ),
    Case(
        "Flux2Transformer@kv-cached",
        "Flux2Transformer2DModel",
        FLUX2,
        FLUX2_INPUTS | dict(kv_cache_mode="cached", kv_cache=built(_flux2_filled_cache)),
        carries_state=True,
    ),
    Case(
        "Flux2Transformer@distilled",
        "Flux2Transformer2DModel",
        FLUX2 | dict(guidance_embeds=False),
        FLUX2_INPUTS | dict(guidance=None),
    ),
    Case("Flux3Transformer", "Flux3Transformer2DModel", FLUX3, FLUX3_INPUTS, idle=FLUX3_NO_IMAGE),
    Case(
        "Flux3Transformer@image-cond",
        "Flux3Transformer2DModel",
        FLUX3,
        FLUX3_INPUTS | dict(image_cond_hidden_states=randn(2, 4, 4), image_cond_ids=grid_ids(1, 2, 2, 1)),
    ),
    Case(
        "Flux3Transformer@flow-map",
        "Flux3Transformer2DModel",
        FLUX3 | dict(flow_map=True),
        FLUX3_INPUTS | dict(target_timestep=full((2,), 0.4)),
        idle=FLUX3_NO_IMAGE,
    ),
)
