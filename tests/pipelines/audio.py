"""Sound: Stable Audio, ACE-Step, LongCat."""

from typing import Any

import torch
from diffusers import (
    AutoencoderSAME,
    EDMDPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    LongCatAudioDiTVae,
    StableAudioProjectionModel,
)
from diffusers.pipelines.ace_step import AceStepConditionEncoder
from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder

from tests.zoo import audio as zoo

from .autoencoders import oobleck
from .case import PipelineCase, dit
from .embeds import embeds, ones
from .encoders import decoder_only, t5, tokenizer, umt5


def _stable() -> dict[str, Any]:
    return dict(
        vae=oobleck(),
        text_encoder=t5(4),
        projection_model=StableAudioProjectionModel(text_encoder_dim=4, conditioning_dim=4, min_value=0, max_value=32),
        tokenizer=tokenizer(),
        transformer=dit("StableAudioDiTModel", zoo.STABLE_AUDIO),
        scheduler=EDMDPMSolverMultistepScheduler(
            solver_order=2, prediction_type="v_prediction", sigma_data=1.0, sigma_schedule="exponential"
        ),
    )


def _stable3() -> dict[str, Any]:
    return dict(
        vae=AutoencoderSAME(
            patch_size=4,
            encoder_channels=8,
            encoder_c_mults=[1],
            encoder_strides=[2],
            encoder_transformer_depths=[1],
            latent_dim=4,
            dim_heads=4,
            sampling_rate=16,
        ),
        text_encoder=None,
        tokenizer=None,
        duration_embedder=StableAudio3DurationEmbedder(output_dim=12),
        transformer=dit("StableAudio3DiTModel", zoo.STABLE_AUDIO3, global_cond_dim=12),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _ace() -> dict[str, Any]:
    return dict(
        vae=oobleck(8),
        text_encoder=decoder_only("Qwen3", 16),
        tokenizer=tokenizer(),
        transformer=dit("AceStepTransformer1DModel", zoo.ACE_STEP),
        condition_encoder=AceStepConditionEncoder(
            hidden_size=32,
            intermediate_size=32,
            text_hidden_dim=16,
            timbre_hidden_dim=8,
            num_lyric_encoder_hidden_layers=1,
            num_timbre_encoder_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    )


def _longcat() -> dict[str, Any]:
    return dict(
        vae=LongCatAudioDiTVae(
            channels=8,
            c_mults=[1, 2],
            strides=[2],
            latent_dim=8,
            encoder_latent_dim=16,
            downsampling_ratio=2,
            sample_rate=24,
        ),
        text_encoder=umt5(12),
        tokenizer=tokenizer(),
        transformer=dit("LongCatAudioDiTTransformer", zoo.LONGCAT, latent_dim=8),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, invert_sigmas=True),
    )


EMBEDS = dict(
    prompt_embeds=embeds(1, 6, 12),
    encoder_attention_mask=ones(1, 6, dtype=torch.bool),
    duration=2.0,
    silence_padding_duration=0.0,
)

CASES = (
    PipelineCase(
        "StableAudioPipeline",
        _stable,
        dict(prompt="a red cat", negative_prompt="blue", audio_end_in_s=2.0, output_type="pt"),
        cut=True,
    ),
    PipelineCase("StableAudio3Pipeline", _stable3, EMBEDS | dict(output_type="pt")),
    PipelineCase(
        "StableAudio3AudioToAudioPipeline",
        _stable3,
        EMBEDS | dict(output_type="pt", audio=embeds(1, 2, 32), init_noise_level=0.7),
    ),
    PipelineCase(
        "StableAudio3InpaintPipeline",
        _stable3,
        EMBEDS | dict(output_type="pt", audio=embeds(1, 2, 32), mask_start_seconds=0.5, mask_end_seconds=1.0),
    ),
    PipelineCase(
        "AceStepPipeline",
        _ace,
        dict(
            prompt="a red cat",
            lyrics="the moon",
            audio_duration=4.0,
            output_type="pt",
            max_text_length=32,
            max_lyric_length=32,
        ),
        cut=True,
    ),
    PipelineCase(
        "LongCatAudioDiTPipeline", _longcat, dict(prompt="a red cat", negative_prompt="blue", audio_duration_s=1.0)
    ),
)
