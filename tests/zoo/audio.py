"""Audio: ACE-Step, Stable Audio, LongCat, MiniMax Music and the spectrogram diffusion decoder."""

import torch

from .case import Case, full, keep_first, randn, values

ACE_STEP = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    in_channels=24,
    audio_acoustic_hidden_dim=8,
    patch_size=2,
    rope_theta=10000.0,
    rms_norm_eps=1e-06,
    sliding_window=16,
)
ACE_STEP_INPUTS = dict(
    hidden_states=randn(2, 8, 8),
    timestep=full((2,), 0.7),
    timestep_r=full((2,), 0.3),
    encoder_hidden_states=randn(2, 10, 32),
    context_latents=randn(2, 8, 16),
)

STABLE_AUDIO = dict(
    sample_size=4,
    in_channels=3,
    num_layers=4,
    attention_head_dim=4,
    num_key_value_attention_heads=2,
    num_attention_heads=4,
    out_channels=3,
    cross_attention_dim=8,
    time_proj_dim=8,
    global_states_input_dim=8,
    cross_attention_input_dim=4,
)
STABLE_AUDIO_INPUTS = dict(
    hidden_states=randn(2, 3, 8),
    timestep=full((1,), 5.0),
    encoder_hidden_states=randn(2, 6, 4),
    global_hidden_states=randn(2, 1, 8),
    rotary_embedding=(randn(9, 2), randn(9, 2)),
)

STABLE_AUDIO3 = dict(
    io_channels=4,
    embed_dim=16,
    depth=4,
    num_heads=2,
    cond_token_dim=12,
    global_cond_dim=10,
    local_add_cond_dim=5,
    timestep_features_dim=16,
    ff_mult=2.0,
    num_memory_tokens=3,
)
STABLE_AUDIO3_INPUTS = dict(
    hidden_states=randn(2, 4, 8),
    timestep=full((2,), 0.6),
    encoder_hidden_states=randn(2, 6, 12),
    global_hidden_states=randn(2, 10),
    encoder_attention_mask=keep_first([6, 4], 6),
    local_add_cond=randn(2, 5, 8),
)

LONGCAT = dict(dit_dim=16, dit_depth=4, dit_heads=2, dit_text_dim=12, latent_dim=6, ff_mult=2.0)
LONGCAT_INPUTS = dict(
    hidden_states=randn(2, 10, 6),
    encoder_hidden_states=randn(2, 7, 12),
    encoder_attention_mask=keep_first([7, 5], 7),
    timestep=full((2,), 0.4),
    attention_mask=keep_first([10, 8], 10),
    latent_cond=randn(2, 10, 6),
)

CASES = (
    Case("AceStepTransformer1DModel", "AceStepTransformer1DModel", ACE_STEP, ACE_STEP_INPUTS),
    Case(
        "AceStepTransformer1DModel@window",
        "AceStepTransformer1DModel",
        ACE_STEP | dict(sliding_window=2),
        # An odd length, which the model pads to whole patches.
        ACE_STEP_INPUTS | dict(hidden_states=randn(2, 13, 8), context_latents=randn(2, 13, 16)),
    ),
    Case("StableAudioDiTModel", "StableAudioDiTModel", STABLE_AUDIO, STABLE_AUDIO_INPUTS),
    Case(
        "StableAudioDiTModel@mask",
        "StableAudioDiTModel",
        STABLE_AUDIO,
        STABLE_AUDIO_INPUTS | dict(attention_mask=keep_first([8, 6], 8), encoder_attention_mask=keep_first([6, 4], 6)),
    ),
    Case("StableAudio3DiTModel", "StableAudio3DiTModel", STABLE_AUDIO3, STABLE_AUDIO3_INPUTS),
    Case(
        "StableAudio3DiTModel@patches",
        "StableAudio3DiTModel",
        STABLE_AUDIO3 | dict(patch_size=2, num_memory_tokens=0, use_differential_attention=False),
        STABLE_AUDIO3_INPUTS | dict(local_add_cond=None),
    ),
    Case("LongCatAudioDiTTransformer", "LongCatAudioDiTTransformer", LONGCAT, LONGCAT_INPUTS),
    Case(
        "LongCatAudioDiTTransformer@local-norm",
        "LongCatAudioDiTTransformer",
        LONGCAT | dict(adaln_type="local", long_skip=False, text_conv=False, use_latent_condition=False),
        LONGCAT_INPUTS | dict(attention_mask=None, latent_cond=None),
    ),
    Case(
        "MiniMaxMusic3Transformer1D",
        "MiniMaxMusic3Transformer1DModel",
        dict(
            in_channels=8,
            condition_dim=16,
            num_layers=4,
            num_attention_heads=2,
            attention_head_dim=8,
            ff_inner_dim=32,
            rotary_dim=4,
            fourier_embedding_dim=8,
        ),
        dict(hidden_states=randn(1, 8, 24), encoder_hidden_states=randn(1, 24, 16), timestep=full((1,), 0.5)),
    ),
    Case(
        "MiniMaxMusic3RVQDepthDecoder",
        "MiniMaxMusic3RVQDepthDecoder",
        dict(
            hidden_size=16,
            num_layers=4,
            num_attention_heads=2,
            intermediate_size=24,
            audio_vocab_size=32,
            num_codebooks=4,
            max_position_embeddings=8,
        ),
        dict(inputs_embeds=randn(2, 5, 16)),
        # The pipeline applies these heads itself, to what forward returns.
        idle=frozenset({"audio_heads"}),
    ),
    Case(
        "T5FilmDecoder",
        "T5FilmDecoder",
        dict(input_dims=8, targets_length=12, d_model=16, num_layers=4, num_heads=2, d_kv=8, d_ff=24, dropout_rate=0.1),
        dict(
            # Tokens of the notes and of the audio before, each with its mask.
            encodings_and_masks=[
                (randn(2, 6, 16), keep_first([6, 4], 6, torch.int64)),
                (randn(2, 5, 16), values([[1] * 5, [0] * 5], torch.int64)),
            ],
            decoder_input_tokens=randn(2, 12, 8),
            decoder_noise_time=values([0.3, 0.8], torch.float32),
        ),
    ),
)
