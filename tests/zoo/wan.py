"""Wan 2.1 and 2.2, VACE and Animate."""

import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from .case import Case, built, full, randn, values

WAN = dict(
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
    qk_norm="rms_norm_across_heads",
    rope_max_seq_len=32,
)
# 2 latent frames of 16 x 16 in patches of 1 x 2 x 2: 128 tokens.
WAN_INPUTS = dict(
    hidden_states=randn(1, 4, 2, 16, 16),
    encoder_hidden_states=randn(1, 12, 16),
    timestep=full((1,), 44, torch.int64),
)

VACE = WAN | dict(in_channels=16, out_channels=16, text_dim=32, vace_layers=(0, 2), vace_in_channels=48)
VACE_INPUTS = dict(
    hidden_states=randn(1, 16, 2, 16, 16),
    encoder_hidden_states=randn(1, 12, 32),
    control_hidden_states=randn(1, 48, 2, 16, 16),
    timestep=full((1,), 44, torch.int64),
)

ANIMATE = WAN | dict(
    in_channels=12,
    latent_channels=4,
    image_dim=16,
    motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
    motion_encoder_size=16,
    motion_style_dim=8,
    motion_dim=4,
    motion_encoder_dim=16,
    face_encoder_hidden_dim=16,
    face_encoder_num_heads=2,
    inject_face_latents_blocks=2,
)
ANIMATE_INPUTS = dict(
    hidden_states=randn(1, 12, 21, 16, 16),
    timestep=full((1,), 44, torch.int64),
    encoder_hidden_states=randn(1, 12, 16),
    encoder_hidden_states_image=randn(1, 12, 16),
    pose_hidden_states=randn(1, 4, 20, 16, 16),
    face_pixel_values=randn(1, 3, 77, 16, 16),
)

# 11 blocks, since the unconditional call skips block 9.
ANIMATE2 = dict(
    patch_size=(1, 2, 2),
    text_len=8,
    in_dim=12,
    dim=24,
    ffn_dim=32,
    freq_dim=32,
    text_dim=16,
    out_dim=4,
    num_heads=2,
    num_layers=11,
    use_img_emb=False,
)
# Reference pass: a driving video of 5 frames in 64 x 64 pixels is 2 latent frames of 8 x 8, so 2 x 4 x 4 = 32 tokens.
ANIMATE2_EXTRACT = dict(
    hidden_states=[randn(4, 2, 8, 8)],
    condition_latents=[randn(8, 2, 8, 8)],
    timestep=full((1,), 900.0),
    encoder_hidden_states=[randn(5, 16)],
    kv_cache=built(lambda _: WanAnimate2KVCache(11)),
    kv_cache_mode="extract",
    seq_len=32,
    offset_grid_sizes=values([[2, 4, 4]], torch.int64),
)


def _animate2_filled_cache(generator: torch.Generator) -> WanAnimate2KVCache:
    cache = WanAnimate2KVCache(11)
    for layer in cache.layer_caches:
        layer.store(torch.randn(1, 32, 2, 12, generator=generator), torch.randn(1, 32, 2, 12, generator=generator))
    return cache


# Generation pass: one reference frame more than the driving video has.
ANIMATE2_CACHED = dict(
    hidden_states=[randn(4, 3, 8, 8)],
    condition_latents=[randn(8, 3, 8, 8)],
    timestep=full((1,), 900.0),
    encoder_hidden_states=[randn(5, 16)],
    kv_cache=built(_animate2_filled_cache),
    kv_cache_mode="cached",
    seq_len=48,
    reference_grid_sizes=values([[2, 4, 4]], torch.int64),
    origin_len=5,
    origin_area=[64, 64],
)

CASES = (
    Case("WanTransformer3D", "WanTransformer3DModel", WAN, WAN_INPUTS),
    Case(
        "WanTransformer3D@batch",
        "WanTransformer3DModel",
        WAN,
        dict(
            hidden_states=randn(2, 4, 2, 16, 16),
            encoder_hidden_states=randn(2, 12, 16),
            timestep=values([44, 239], torch.int64),
            attention_kwargs=None,
        ),
    ),
    Case(
        "WanTransformer3D@i2v",
        "WanTransformer3DModel",
        WAN | dict(in_channels=12, image_dim=20, added_kv_proj_dim=24),
        WAN_INPUTS | dict(hidden_states=randn(1, 12, 2, 16, 16), encoder_hidden_states_image=randn(1, 257, 20)),
    ),
    Case(
        "WanTransformer3D@first-last-frame",
        "WanTransformer3DModel",
        WAN | dict(in_channels=12, image_dim=20, added_kv_proj_dim=24, pos_embed_seq_len=10),
        WAN_INPUTS | dict(hidden_states=randn(1, 12, 2, 16, 16), encoder_hidden_states_image=randn(2, 5, 20)),
    ),
    Case(
        "WanTransformer3D@ti2v",
        "WanTransformer3DModel",
        WAN,
        # One timestep for every token: the first frame is the given image, so it is at time 0.
        WAN_INPUTS | dict(timestep=values([[0] * 64 + [44] * 64], torch.int64)),
    ),
    Case("WanVACETransformer3D", "WanVACETransformer3DModel", VACE, VACE_INPUTS),
    Case(
        "WanVACETransformer3D@scale",
        "WanVACETransformer3DModel",
        VACE | dict(num_layers=6, vace_layers=(0, 2, 4)),
        VACE_INPUTS | dict(control_hidden_states_scale=values([1.0, 0.5, 0.25], torch.float32)),
    ),
    Case("WanAnimateTransformer3D", "WanAnimateTransformer3DModel", ANIMATE, ANIMATE_INPUTS),
    Case("WanAnimate2Transformer3D", "WanAnimate2Transformer3DModel", ANIMATE2, ANIMATE2_CACHED, carries_state=True),
    Case(
        "WanAnimate2Transformer3D@unconditional",
        "WanAnimate2Transformer3DModel",
        ANIMATE2,
        ANIMATE2_CACHED | dict(is_uncondtion=True),
        carries_state=True,
        idle=frozenset({"blocks.9"}),
    ),
    Case(
        "WanAnimate2Transformer3D@extract",
        "WanAnimate2Transformer3DModel",
        ANIMATE2,
        ANIMATE2_EXTRACT,
        carries_state=True,
    ),
    Case(
        "WanAnimate2Transformer3D@image",
        "WanAnimate2Transformer3DModel",
        ANIMATE2 | dict(num_layers=4, use_img_emb=True),
        ANIMATE2_EXTRACT | dict(encoder_hidden_states_image=randn(1, 6, 1280)),
        carries_state=True,
    ),
)
