"""Cosmos Predict and Transfer, and Cosmos 3 Omni."""

import torch

from .case import Case, full, keep_first, randn, values

COSMOS = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=12,
    num_layers=4,
    mlp_ratio=2,
    text_embed_dim=16,
    adaln_lora_dim=4,
    max_size=(4, 32, 32),
    patch_size=(1, 2, 2),
    rope_scale=(2.0, 1.0, 1.0),
    concat_padding_mask=True,
    extra_pos_embed_type="learnable",
)
COSMOS_INPUTS = dict(
    hidden_states=randn(1, 4, 1, 16, 16),
    timestep=full((1,), 44, torch.int64),
    encoder_hidden_states=randn(1, 12, 16),
    attention_mask=full((1, 12), 1.0),
    fps=30,
    padding_mask=full((1, 1, 16, 16), 0.0),
)

OMNI = dict(
    head_dim=6,
    hidden_act="relu2",
    hidden_size=12,
    intermediate_size=24,
    latent_channel=2,
    latent_patch_size=1,
    num_attention_heads=2,
    num_hidden_layers=4,
    num_key_value_heads=1,
    patch_latent_dim=2,
    qk_norm_for_text=False,
    rms_norm_eps=1e-05,
    rope_axes_dim=(1, 1, 1),
    rope_theta=100000000.0,
    vocab_size=32,
)
# 3 text tokens, then 2 latent frames of 2 x 2, of which the second is to be painted.
OMNI_INPUTS = dict(
    input_ids=values([1, 2, 5], torch.int64),
    text_indexes=values([0, 1, 2], torch.int64),
    position_ids=values(
        [[0, 1, 2, 9, 9, 9, 9, 10, 10, 10, 10], [0, 1, 2] + [0, 0, 1, 1] * 2, [0, 1, 2] + [0, 1] * 4], torch.int64
    ),
    und_len=3,
    sequence_length=11,
    vision_tokens=[randn(1, 2, 2, 2, 2)],
    vision_token_shapes=[(2, 2, 2)],
    vision_sequence_indexes=values(list(range(3, 11)), torch.int64),
    vision_mse_loss_indexes=values(list(range(7, 11)), torch.int64),
    vision_timesteps=full((4,), 500.0),
    vision_noisy_frame_indexes=[values([1], torch.int64)],
)
# Behind the frames 3 sound tokens and 2 actions.
OMNI_SOUND_ACTION_INPUTS = OMNI_INPUTS | dict(
    sequence_length=16,
    position_ids=values([list(range(16))] * 3, torch.int64),
    sound_tokens=[randn(5, 3)],
    sound_token_shapes=[(3, 1, 1)],
    sound_sequence_indexes=values([11, 12, 13], torch.int64),
    sound_mse_loss_indexes=values([11, 12, 13], torch.int64),
    sound_timesteps=full((3,), 500.0),
    sound_noisy_frame_indexes=[values([0, 1, 2], torch.int64)],
    action_tokens=[randn(2, 4)],
    action_token_shapes=[(2, 1, 1)],
    action_sequence_indexes=values([14, 15], torch.int64),
    action_mse_loss_indexes=values([14, 15], torch.int64),
    action_timesteps=full((2,), 500.0),
    action_noisy_frame_indexes=[values([0, 1], torch.int64)],
    action_domain_ids=[values([1], torch.int64)],
)

CASES = (
    Case("CosmosTransformer", "CosmosTransformer3DModel", COSMOS, COSMOS_INPUTS),
    Case(
        "CosmosTransformerVideoToWorld",
        "CosmosTransformer3DModel",
        COSMOS | dict(in_channels=5),
        COSMOS_INPUTS | dict(condition_mask=full((1, 1, 1, 16, 16), 1.0), attention_mask=keep_first([9], 12)),
    ),
    Case(
        "CosmosTransformer@transfer",
        "CosmosTransformer3DModel",
        COSMOS
        | dict(
            extra_pos_embed_type=None,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=20,
            encoder_hidden_states_channels=16,
            controlnet_block_every_n=2,
            img_context_dim_in=10,
            img_context_num_tokens=5,
            img_context_dim_out=24,
        ),
        COSMOS_INPUTS
        | dict(
            hidden_states=randn(2, 4, 2, 8, 8),
            # One timestep per latent frame.
            timestep=values([[[[[0.0]], [[0.4]]]], [[[[0.0]], [[0.4]]]]], torch.float32),
            encoder_hidden_states=(randn(2, 12, 20), randn(2, 5, 10)),
            attention_mask=None,
            block_controlnet_hidden_states=[randn(2, 32, 24), randn(2, 32, 24)],
            padding_mask=full((1, 1, 16, 16), 0.0),
        ),
    ),
    Case("Cosmos3OmniTransformer", "Cosmos3OmniTransformer", OMNI, OMNI_INPUTS),
    Case(
        "Cosmos3OmniTransformer@sound-action",
        "Cosmos3OmniTransformer",
        OMNI | dict(sound_gen=True, sound_dim=5, action_gen=True, action_dim=4, num_embodiment_domains=3),
        OMNI_SOUND_ACTION_INPUTS,
    ),
)
