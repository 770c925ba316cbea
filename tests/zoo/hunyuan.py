"""Hunyuan: DiT, Image, Video, Video 1.5, FramePack; and MotifVideo, which is built like HunyuanVideo."""

import torch

from .case import Case, full, keep_first, randn, values, without

DIT = dict(
    sample_size=8,
    patch_size=2,
    in_channels=4,
    num_layers=6,
    attention_head_dim=8,
    num_attention_heads=2,
    cross_attention_dim=8,
    cross_attention_dim_t5=8,
    pooled_projection_dim=4,
    hidden_size=16,
    text_len=4,
    text_len_t5=4,
    activation_fn="gelu-approximate",
)
DIT_INPUTS = dict(
    hidden_states=randn(2, 4, 8, 8),
    encoder_hidden_states=randn(2, 4, 8),
    text_embedding_mask=keep_first([4, 3], 4, torch.float32),
    encoder_hidden_states_t5=randn(2, 4, 8),
    text_embedding_mask_t5=keep_first([4, 2], 4, torch.float32),
    timestep=values([44.0, 239.0], torch.float32),
    image_meta_size=values([[1024.0, 1024.0, 16.0, 16.0, 0.0, 0.0]] * 2, torch.float32),
    style=full((2,), 0, torch.int64),
    image_rotary_emb=[randn(16, 8), randn(16, 8)],
)

VIDEO = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=10,
    num_layers=4,
    num_single_layers=4,
    num_refiner_layers=1,
    patch_size=1,
    patch_size_t=1,
    guidance_embeds=True,
    text_embed_dim=16,
    pooled_projection_dim=8,
    rope_axes_dim=(2, 4, 4),
    image_condition_type=None,
)
VIDEO_INPUTS = dict(
    hidden_states=randn(1, 4, 2, 8, 8),
    timestep=full((1,), 44.0),
    encoder_hidden_states=randn(1, 12, 16),
    pooled_projections=randn(1, 8),
    encoder_attention_mask=full((1, 12), 1.0),
    guidance=full((1,), 6000.0),
)

FRAMEPACK = VIDEO | dict(patch_size=2, has_image_proj=True, image_proj_dim=16, has_clean_x_embedder=True)
FRAMEPACK_INPUTS = VIDEO_INPUTS | dict(
    hidden_states=randn(1, 4, 3, 8, 8),
    image_embeds=randn(1, 12, 16),
    indices_latents=values([11, 12, 13], torch.float32),
    latents_clean=randn(1, 4, 2, 8, 8),
    indices_latents_clean=values([0, 10], torch.float32),
    latents_history_2x=randn(1, 4, 2, 8, 8),
    indices_latents_history_2x=values([8, 9], torch.float32),
    latents_history_4x=randn(1, 4, 8, 8, 8),
    indices_latents_history_4x=values([0, 1, 2, 3, 4, 5, 6, 7], torch.float32),
)

VIDEO15 = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=8,
    num_layers=4,
    num_refiner_layers=1,
    mlp_ratio=2.0,
    patch_size=1,
    patch_size_t=1,
    text_embed_dim=16,
    text_embed_2_dim=8,
    image_embed_dim=12,
    rope_axes_dim=(2, 2, 4),
    target_size=16,
    task_type="t2v",
)
VIDEO15_INPUTS = dict(
    hidden_states=randn(1, 4, 1, 8, 8),
    timestep=full((1,), 1.0),
    encoder_hidden_states=randn(1, 6, 16),
    encoder_hidden_states_2=randn(1, 4, 8),
    encoder_attention_mask=full((1, 6), 1.0),
    encoder_attention_mask_2=full((1, 4), 1.0),
    # All zeros mean that there is no image.
    image_embeds=full((1, 3, 12), 0.0),
)

IMAGE = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=8,
    num_layers=4,
    num_single_layers=4,
    num_refiner_layers=1,
    patch_size=(1, 1),
    text_embed_dim=16,
    rope_axes_dim=(4, 4),
)
IMAGE_INPUTS = dict(
    hidden_states=randn(1, 4, 8, 8),
    timestep=full((1,), 500.0),
    encoder_hidden_states=randn(1, 6, 16),
    encoder_attention_mask=keep_first([4], 6),
)

MOTIF = dict(
    in_channels=9,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=8,
    num_layers=4,
    num_single_layers=4,
    patch_size=2,
    patch_size_t=1,
    text_embed_dim=16,
    rope_axes_dim=(2, 2, 4),
)
MOTIF_INPUTS = dict(
    hidden_states=randn(1, 9, 2, 8, 8),
    timestep=full((1,), 500.0),
    encoder_hidden_states=randn(1, 6, 16),
    encoder_attention_mask=keep_first([4], 6),
)

CASES = (
    Case("HunyuanDiT", "HunyuanDiT2DModel", DIT, DIT_INPUTS),
    Case(
        "HunyuanDiT@controlnet",
        "HunyuanDiT2DModel",
        DIT,
        # One residual for each of the two long skips; forward pops them from the caller's list.
        DIT_INPUTS | dict(controlnet_block_samples=[randn(2, 16, 16), randn(2, 16, 16)]),
    ),
    Case("HunyuanVideoTransformer", "HunyuanVideoTransformer3DModel", VIDEO, VIDEO_INPUTS),
    Case(
        "HunyuanVideoTransformer@batch-mask",
        "HunyuanVideoTransformer3DModel",
        VIDEO | dict(guidance_embeds=False),
        dict(
            hidden_states=randn(2, 4, 2, 8, 8),
            timestep=full((2,), 44.0),
            encoder_hidden_states=randn(2, 12, 16),
            pooled_projections=randn(2, 8),
            encoder_attention_mask=keep_first([12, 7], 12, torch.int64),
        ),
    ),
    Case(
        "HunyuanVideoI2VTransformer",
        "HunyuanVideoTransformer3DModel",
        VIDEO | dict(in_channels=9, guidance_embeds=False, image_condition_type="latent_concat"),
        without(VIDEO_INPUTS, "guidance") | dict(hidden_states=randn(1, 9, 2, 8, 8)),
    ),
    Case(
        "HunyuanVideoTokenReplaceTransformer",
        "HunyuanVideoTransformer3DModel",
        VIDEO | dict(in_channels=2, image_condition_type="token_replace"),
        VIDEO_INPUTS | dict(hidden_states=randn(1, 2, 2, 8, 8)),
    ),
    Case(
        "HunyuanVideoFramepackTransformer",
        "HunyuanVideoFramepackTransformer3DModel",
        FRAMEPACK,
        FRAMEPACK_INPUTS,
    ),
    Case(
        "HunyuanVideoFramepackTransformer@mask",
        "HunyuanVideoFramepackTransformer3DModel",
        FRAMEPACK,
        FRAMEPACK_INPUTS | dict(encoder_attention_mask=keep_first([9], 12, torch.int64)),
    ),
    Case("HunyuanVideo15Transformer", "HunyuanVideo15Transformer3DModel", VIDEO15, VIDEO15_INPUTS),
    Case(
        "HunyuanVideo15Transformer@i2v-mask",
        "HunyuanVideo15Transformer3DModel",
        VIDEO15 | dict(task_type="i2v"),
        VIDEO15_INPUTS
        | dict(
            encoder_attention_mask=keep_first([4], 6, torch.float32),
            encoder_attention_mask_2=keep_first([2], 4, torch.float32),
            image_embeds=randn(1, 3, 12),
        ),
    ),
    Case(
        "HunyuanVideo15Transformer@meanflow",
        "HunyuanVideo15Transformer3DModel",
        VIDEO15 | dict(use_meanflow=True),
        VIDEO15_INPUTS | dict(timestep_r=full((1,), 0.5)),
    ),
    Case("HunyuanImageTransformer", "HunyuanImageTransformer2DModel", IMAGE, IMAGE_INPUTS),
    Case(
        "HunyuanImageTransformer@glyphs",
        "HunyuanImageTransformer2DModel",
        IMAGE | dict(text_embed_2_dim=8, guidance_embeds=True, use_meanflow=True),
        IMAGE_INPUTS
        | dict(
            encoder_hidden_states_2=randn(1, 5, 8),
            encoder_attention_mask_2=keep_first([3], 5),
            guidance=full((1,), 3500.0),
            timestep_r=full((1,), 250.0),
        ),
    ),
    Case(
        "HunyuanImageTransformer@refiner",
        "HunyuanImageTransformer2DModel",
        IMAGE | dict(in_channels=8, patch_size=(1, 1, 1), rope_axes_dim=(2, 2, 4)),
        IMAGE_INPUTS | dict(hidden_states=randn(1, 8, 1, 8, 8)),
    ),
    Case("MotifVideoTransformer", "MotifVideoTransformer3DModel", MOTIF, MOTIF_INPUTS),
    Case(
        "MotifVideoTransformer@image-decoder",
        "MotifVideoTransformer3DModel",
        MOTIF
        | dict(
            num_single_layers=6,
            num_decoder_layers=2,
            image_embed_dim=12,
            enable_text_cross_attention_dual=True,
            enable_text_cross_attention_single=True,
        ),
        MOTIF_INPUTS | dict(image_embeds=randn(1, 3, 12)),
    ),
)
