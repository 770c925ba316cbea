"""Video pipelines: HunyuanVideo, CogVideoX, LTX, LTX-2, Mochi and Allegro."""

from typing import Any

from diffusers import (
    AutoencoderKLLTX2Audio,
    CogVideoXDDIMScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from tests.zoo import cog, hunyuan
from tests.zoo import video as zoo

from .autoencoders import allegro_vae, cogvideo_vae, hunyuan_video_vae, ltx2_vae, ltx_vae, mochi_vae
from .case import PipelineCase, dit
from .encoders import clip, decoder_only, gemma3, t5, tokenizer

TEXT = dict(prompt="a red cat", negative_prompt="blue", height=16, width=16, num_frames=9)
SHORT = dict(max_sequence_length=16)
LARGER = dict(height=32, width=32)


def _hunyuan() -> dict[str, Any]:
    return dict(
        text_encoder=decoder_only("Llama", 16, layers=4),
        tokenizer=tokenizer(),
        transformer=dit("HunyuanVideoTransformer3DModel", hunyuan.VIDEO),
        vae=hunyuan_video_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=clip(8),
        tokenizer_2=tokenizer(),
    )


def _cogvideo() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=t5(8),
        vae=cogvideo_vae(),
        transformer=dit(
            "CogVideoXTransformer3DModel",
            cog.VIDEOX,
            max_text_seq_length=16,
            sample_width=2,
            sample_height=2,
            sample_frames=9,
        ),
        scheduler=CogVideoXDDIMScheduler(),
    )


def _ltx() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=ltx_vae(),
        text_encoder=t5(16),
        tokenizer=tokenizer(),
        transformer=dit("LTXVideoTransformer3DModel", zoo.LTX),
    )


def _ltx2() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=ltx2_vae(),
        audio_vae=AutoencoderKLLTX2Audio(
            base_channels=4,
            ch_mult=(1,),
            num_res_blocks=1,
            resolution=32,
            latent_channels=2,
            mel_bins=8,
        ),
        text_encoder=gemma3(),
        tokenizer=tokenizer(),
        connectors=LTX2TextConnectors(
            caption_channels=32,
            text_proj_in_factor=3,
            video_connector_num_attention_heads=4,
            video_connector_attention_head_dim=8,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=None,
            audio_connector_num_attention_heads=4,
            audio_connector_attention_head_dim=8,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=None,
            rope_double_precision=False,
        ),
        transformer=dit("LTX2VideoTransformer3DModel", zoo.LTX2, caption_channels=32),
        vocoder=LTX2Vocoder(
            in_channels=16,
            hidden_channels=8,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
        ),
    )


def _mochi() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=mochi_vae(12),
        text_encoder=t5(16),
        tokenizer=tokenizer(),
        transformer=dit("MochiTransformer3DModel", zoo.MOCHI, in_channels=12),
    )


def _allegro() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=t5(8),
        vae=allegro_vae(),
        transformer=dit("AllegroTransformer3DModel", zoo.ALLEGRO),
        scheduler=EulerAncestralDiscreteScheduler(),
    )


HUNYUAN = TEXT | SHORT | dict(prompt_template={"template": "system {} user", "crop_start": 1})
LTX2 = (
    TEXT
    | SHORT
    | LARGER
    | dict(frame_rate=25.0, stg_scale=0.0, modality_scale=1.0, audio_stg_scale=0.0, audio_modality_scale=1.0)
)

CASES = (
    PipelineCase("HunyuanVideoPipeline", _hunyuan, HUNYUAN),
    PipelineCase("HunyuanVideoPipeline", _hunyuan, HUNYUAN | dict(true_cfg_scale=2.0), "true_cfg"),
    PipelineCase("CogVideoXPipeline", _cogvideo, TEXT | SHORT, cut=True),
    PipelineCase("LTXPipeline", _ltx, TEXT | SHORT | LARGER, cut=True),
    PipelineCase("LTX2Pipeline", _ltx2, LTX2, cut=True),
    PipelineCase(
        "LTX2Pipeline",
        _ltx2,
        LTX2 | dict(stg_scale=1.0, modality_scale=3.0, audio_stg_scale=1.0, spatio_temporal_guidance_blocks=[2]),
        "four kinds of guidance",
        cut=True,
    ),
    PipelineCase("MochiPipeline", _mochi, TEXT | SHORT, cut=True),
    PipelineCase(
        "AllegroPipeline",
        _allegro,
        TEXT | SHORT | dict(num_frames=24),
        cut=True,
    ),
)
