"""Video pipelines: HunyuanVideo, CogVideoX, LTX, LTX-2, Mochi and Allegro."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    ClassifierFreeGuidance,
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)

from tests.zoo import cog, hunyuan
from tests.zoo import video as zoo

from .autoencoders import allegro_vae, image_vae, magvit_vae, mochi_vae, wan_vae
from .case import PipelineCase, dit
from .embeds import embeds, ones
from .encoders import t5, tokenizer

TEXT = dict(prompt="a red cat", negative_prompt="blue", height=16, width=16, num_frames=9)
SHORT = dict(max_sequence_length=16)
LARGER = dict(height=32, width=32)


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


def _latte() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=t5(8),
        vae=image_vae(),
        transformer=dit("LatteTransformer3DModel", zoo.LATTE),
        scheduler=DDIMScheduler(),
    )


def _easy(**changes: Any) -> dict[str, Any]:
    vae = magvit_vae()
    vae.register_to_config(
        cache_mag_vae=False
    )  # an entry of the checkpoint's file, which the inpainting pipeline reads
    return dict(
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=dit("EasyAnimateTransformer3DModel", cog.EASY_ANIMATE, **changes),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _motif() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=wan_vae(),
        text_encoder=None,
        tokenizer=None,
        transformer=dit("MotifVideoTransformer3DModel", hunyuan.MOTIF),
        guider=ClassifierFreeGuidance(guidance_scale=3.0),
    )


def frames(count: int, size: int, channels: int = 3) -> Callable[[], torch.Tensor]:
    """Makes a video of values in [0, 1], shape (1, channels, frames, height, width)."""
    return lambda: torch.rand((1, channels, count, size, size), generator=torch.Generator().manual_seed(0))


EASY = dict(
    prompt_embeds=embeds(1, 16, 16),
    prompt_attention_mask=ones(1, 16),
    negative_prompt_embeds=embeds(1, 16, 16, seed=1),
    negative_prompt_attention_mask=ones(1, 16),
    height=16,
    width=16,
    num_frames=5,
)
MOTIF = dict(
    prompt_embeds=embeds(1, 6, 16),
    prompt_attention_mask=ones(1, 6),
    negative_prompt_embeds=embeds(1, 6, 16, seed=1),
    negative_prompt_attention_mask=ones(1, 6),
    height=16,
    width=16,
    num_frames=5,
)

CASES = (
    PipelineCase("MochiPipeline", _mochi, TEXT | SHORT, cut=True),
    PipelineCase(
        "AllegroPipeline",
        _allegro,
        TEXT | SHORT | dict(num_frames=24),
        cut=True,
    ),
    PipelineCase(
        "LattePipeline",
        _latte,
        dict(prompt="a red cat", height=16, width=16, video_length=3, clean_caption=False),
        cut=True,
    ),
    PipelineCase("EasyAnimatePipeline", _easy, EASY, cut=True),
    PipelineCase(
        "EasyAnimateInpaintPipeline",
        lambda: _easy(in_channels=9),
        EASY | dict(video=frames(5, 16), mask_video=frames(5, 16, 1)),
        cut=True,
    ),
    PipelineCase("MotifVideoPipeline", _motif, MOTIF),
)
