"""Video models built on Wan's block: SkyReels, ChronoEdit, AnyFlow and Helios."""

import torch

from .case import Case, full, randn, values, without
from .wan import WAN, WAN_INPUTS

I2V = WAN | dict(in_channels=12, image_dim=20, added_kv_proj_dim=24)
I2V_INPUTS = WAN_INPUTS | dict(hidden_states=randn(1, 12, 2, 16, 16), encoder_hidden_states_image=randn(1, 9, 20))

ANYFLOW = dict(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    freq_dim=256,
    ffn_dim=32,
    num_layers=4,
    cross_attn_norm=True,
    rope_max_seq_len=32,
    gate_value=0.25,
    deltatime_type="r",
)
ANYFLOW_INPUTS = dict(
    hidden_states=randn(1, 2, 4, 16, 16),
    timestep=full((1, 2), 500.0),
    r_timestep=full((1, 2), 250.0),
    encoder_hidden_states=randn(1, 12, 16),
)

ANYFLOW_FAR = ANYFLOW | dict(compressed_patch_size=(1, 4, 4), full_chunk_limit=3)
ANYFLOW_FAR_INPUTS = dict(
    hidden_states=randn(1, 4, 4, 16, 16),
    timestep=full((1, 4), 500.0),
    r_timestep=full((1, 4), 250.0),
    encoder_hidden_states=randn(1, 12, 16),
    chunk_partition=[2, 2],
)
# Chunks of 2 frames. A frame is 64 tokens in full and 16 compressed; the last 3 chunks are kept in full.
ANYFLOW_FAR_CACHE = {
    layer: dict(full_cache=randn(2, 1, 2, 3 * 2 * 64, 12), compressed_cache=randn(2, 1, 2, 2 * 2 * 16, 12))
    for layer in range(4)
}

HELIOS = without(WAN, "rope_max_seq_len") | dict(
    rope_dim=(4, 4, 4),
    has_multi_term_memory_patch=True,
    guidance_cross_attn=True,
    zero_history_timestep=True,
    is_amplify_history=False,
)
HELIOS_INPUTS = WAN_INPUTS | dict(
    indices_hidden_states=values([[6, 7]], torch.float32),
    indices_latents_history_short=values([[5]], torch.float32),
    indices_latents_history_mid=values([[4]], torch.float32),
    indices_latents_history_long=values([[0, 1, 2, 3]], torch.float32),
    latents_history_short=randn(1, 4, 1, 16, 16),
    latents_history_mid=randn(1, 4, 1, 16, 16),
    latents_history_long=randn(1, 4, 4, 16, 16),
)

CASES = (
    Case("SkyReelsV2Transformer3D", "SkyReelsV2Transformer3DModel", WAN, WAN_INPUTS),
    Case("SkyReelsV2Transformer3D@i2v", "SkyReelsV2Transformer3DModel", I2V, I2V_INPUTS),
    Case(
        "SkyReelsV2Transformer3D@diffusion-forcing",
        "SkyReelsV2Transformer3DModel",
        WAN | dict(inject_sample_info=True, num_frame_per_block=2),
        WAN_INPUTS
        | dict(
            hidden_states=randn(1, 4, 4, 8, 8),
            timestep=values([[10, 10, 500, 500]], torch.int64),
            enable_diffusion_forcing=True,
            fps=[1],
        ),
    ),
    Case("ChronoEditTransformer3D", "ChronoEditTransformer3DModel", I2V, I2V_INPUTS),
    Case(
        "ChronoEditTransformer3D@many-frames",
        "ChronoEditTransformer3DModel",
        WAN,
        WAN_INPUTS | dict(hidden_states=randn(1, 4, 3, 8, 8)),
    ),
    Case("AnyFlowTransformer3D", "AnyFlowTransformer3DModel", ANYFLOW, ANYFLOW_INPUTS),
    Case(
        "AnyFlowTransformer3D@i2v",
        "AnyFlowTransformer3DModel",
        ANYFLOW | dict(image_dim=20),
        ANYFLOW_INPUTS | dict(encoder_hidden_states_image=randn(1, 9, 20)),
    ),
    Case("AnyFlowFARTransformer3D", "AnyFlowFARTransformer3DModel", ANYFLOW_FAR, ANYFLOW_FAR_INPUTS),
    Case(
        "AnyFlowFARTransformer3D@kv-cached",
        "AnyFlowFARTransformer3DModel",
        ANYFLOW_FAR,
        ANYFLOW_FAR_INPUTS
        | dict(
            hidden_states=randn(1, 2, 4, 16, 16),
            timestep=full((1, 2), 500.0),
            r_timestep=full((1, 2), 250.0),
            chunk_partition=[2, 2, 2, 2],
            kv_cache=ANYFLOW_FAR_CACHE,
            kv_cache_flag=dict(num_cached_chunks=3, is_cache_step=False),
        ),
        carries_state=True,
    ),
    Case(
        "AnyFlowFARTransformer3D@kv-write",
        "AnyFlowFARTransformer3DModel",
        ANYFLOW_FAR,
        # Four clean chunks go through the model only to fill the caches.
        ANYFLOW_FAR_INPUTS
        | dict(
            hidden_states=randn(1, 8, 4, 16, 16),
            timestep=full((1, 8), 0.0),
            r_timestep=full((1, 8), 0.0),
            chunk_partition=[2, 2, 2, 2],
            kv_cache=ANYFLOW_FAR_CACHE,
            kv_cache_flag=dict(num_cached_chunks=3, is_cache_step=True),
        ),
        carries_state=True,
    ),
    Case("HeliosTransformer3D", "HeliosTransformer3DModel", HELIOS, HELIOS_INPUTS),
    Case(
        "HeliosTransformer3D@amplified-history",
        "HeliosTransformer3DModel",
        HELIOS | dict(is_amplify_history=True, zero_history_timestep=False, guidance_cross_attn=False),
        HELIOS_INPUTS,
    ),
)
