"""Kandinsky: the prior, 5, 6 and the super-resolution model of 6."""

import torch

from .case import Case, full, keep_first, randn, values

K5 = dict(
    in_visual_dim=16,
    in_text_dim=32,
    in_text_dim2=32,
    time_dim=16,
    out_visual_dim=16,
    patch_size=(1, 2, 2),
    model_dim=32,
    ff_dim=32,
    num_text_blocks=2,
    num_visual_blocks=4,
    axes_dims=(4, 2, 2),
    visual_cond=False,
    attention_type="regular",
)
K5_INPUTS = dict(
    hidden_states=randn(1, 2, 8, 8, 16),
    encoder_hidden_states=randn(1, 7, 32),
    timestep=full((1,), 500.0),
    pooled_projections=randn(1, 32),
    visual_rope_pos=[
        values([0, 1], torch.int64),
        values([0, 1, 2, 3], torch.int64),
        values([0, 1, 2, 3], torch.int64),
    ],
    text_rope_pos=values(list(range(7)), torch.int64),
)

K6 = dict(
    in_visual_dim=4,
    out_visual_dim=4,
    in_text_dim=12,
    in_text_dim2=10,
    time_dim=16,
    patch_size=(1, 2, 2),
    model_dim=16,
    ff_dim=24,
    num_text_blocks=2,
    num_visual_blocks=4,
    axes_dims=(4, 2, 2),
    visual_cond=True,
    in_audio_dim=6,
    out_audio_dim=6,
    model_dim_a=16,
    time_dim_a=16,
    ff_dim_a=20,
    axes_dims_a=(4, 2, 2),
)
K6_INPUTS = dict(
    hidden_states=randn(1, 2, 8, 8, 9),
    encoder_hidden_states=randn(1, 7, 12),
    pooled_projections=randn(1, 10),
    timestep=full((1,), 500.0),
    audio_hidden_states=randn(1, 5, 6),
)

CASES = (
    Case(
        "PriorTransformer",
        "PriorTransformer",
        dict(
            num_attention_heads=2,
            attention_head_dim=4,
            num_layers=4,
            embedding_dim=8,
            num_embeddings=7,
            additional_embeddings=4,
        ),
        dict(hidden_states=randn(4, 8), timestep=2, proj_embedding=randn(4, 8), encoder_hidden_states=randn(4, 7, 8)),
    ),
    Case("Kandinsky5Transformer3DModel", "Kandinsky5Transformer3DModel", K5, K5_INPUTS),
    Case(
        "Kandinsky5Transformer3DModel@sparse",
        "Kandinsky5Transformer3DModel",
        K5 | dict(visual_cond=True, attention_type="nabla"),
        K5_INPUTS
        | dict(
            hidden_states=randn(1, 2, 16, 16, 33),
            visual_rope_pos=[
                values([0, 1], torch.int64),
                values(list(range(8)), torch.int64),
                values(list(range(8)), torch.int64),
            ],
            scale_factor=(1.0, 2.0, 2.0),
            sparse_params=dict(to_fractal=True, P=0.9, sta_mask=values([[[[True, False], [True, True]]]], torch.bool)),
        ),
        attention_backend="flex",
    ),
    Case("Kandinsky6Transformer3DModel", "Kandinsky6Transformer3DModel", K6, K6_INPUTS),
    Case(
        "Kandinsky6Transformer3DModel@mask",
        "Kandinsky6Transformer3DModel",
        K6 | dict(ca_rope=True, cross_gates=True, fix_modulation=True, visual_token_type_num_embeddings=2),
        K6_INPUTS
        | dict(
            encoder_attention_mask=keep_first([5], 7),
            visual_token_type_ids=values([[0, 1]], torch.int64),
            visual_rope_pos=(
                values([1, 0], torch.int64),
                values([0, 1, 2, 3], torch.int64),
                values([0, 1, 2, 3], torch.int64),
            ),
        ),
    ),
    Case(
        "Kandinsky6SRTransformer3DModel",
        "Kandinsky6SRTransformer3DModel",
        dict(
            in_visual_dim=4,
            out_visual_dim=4,
            time_dim=16,
            model_dim=32,
            ff_dim=32,
            num_visual_blocks=4,
            axes_dims=(4, 2, 2),
            nabla_window=(1, 1, 1),
        ),
        dict(hidden_states=randn(1, 2, 16, 16, 9), timestep=full((1,), 500.0)),
    ),
)
