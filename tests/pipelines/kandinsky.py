"""Kandinsky 5 and 6, and the prior of 2."""

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UnCLIPScheduler

from tests.zoo import kandinsky as zoo

from .autoencoders import hunyuan_video_vae, image_vae
from .case import PipelineCase, dit, picture
from .embeds import embeds
from .encoders import clip_projected, clip_vision_projected, image_processor, tokenizer

EMBEDS = dict(
    prompt_embeds_qwen=embeds(1, 7, 32),
    prompt_embeds_clip=embeds(1, 32, seed=2),
    negative_prompt_embeds_qwen=embeds(1, 5, 32, seed=1),
    negative_prompt_embeds_clip=embeds(1, 32, seed=3),
    prompt_cu_seqlens=lambda: torch.tensor([0, 7]),
    negative_prompt_cu_seqlens=lambda: torch.tensor([0, 5]),
    height=16,
    width=16,
)


def _five(video: bool, **changes: Any) -> dict[str, Any]:
    init = zoo.K5 | dict(in_visual_dim=4, out_visual_dim=4) | changes
    return dict(
        transformer=dit("Kandinsky5Transformer3DModel", init),
        vae=hunyuan_video_vae() if video else image_vae(blocks=4),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _small(pipeline: Any) -> None:
    """The image pipelines know a list of sizes only."""
    pipeline.resolutions = [(16, 16)]


def _six() -> dict[str, Any]:
    return dict(
        transformer=dit("Kandinsky6Transformer3DModel", zoo.K6),
        vae=hunyuan_video_vae(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _prior() -> dict[str, Any]:
    return dict(
        prior=dit(
            "PriorTransformer",
            dict(
                num_attention_heads=2,
                attention_head_dim=12,
                embedding_dim=32,
                num_layers=4,
                additional_embeddings=4,
                num_embeddings=77,
            ),
        ),
        image_encoder=clip_vision_projected(),
        text_encoder=clip_projected(),
        tokenizer=tokenizer(77),
        scheduler=UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", num_train_timesteps=1000, clip_sample_range=10.0
        ),
        image_processor=image_processor(),
    )


CASES = (
    PipelineCase("Kandinsky5T2VPipeline", lambda: _five(True), EMBEDS | dict(num_frames=5)),
    PipelineCase(
        "Kandinsky5I2VPipeline",
        lambda: _five(True, visual_cond=True),
        EMBEDS | dict(num_frames=25, image=picture(16, 16)),
    ),
    PipelineCase("Kandinsky5T2IPipeline", lambda: _five(False), EMBEDS, prepare=_small),
    PipelineCase(
        "Kandinsky5I2IPipeline",
        lambda: _five(False, visual_cond=True),
        EMBEDS | dict(image=picture(16, 16), height=16, width=16),
        prepare=_small,
    ),
    PipelineCase("KandinskyPriorPipeline", _prior, dict(prompt="a red cat", negative_prompt="blue"), cut=True),
    PipelineCase("KandinskyV22PriorPipeline", _prior, dict(prompt="a red cat", negative_prompt="blue"), cut=True),
    PipelineCase(
        "KandinskyV22PriorEmb2EmbPipeline",
        _prior,
        dict(prompt="a red cat", image=picture(32, 32), strength=0.7),
        cut=True,
        steps=3,
    ),
    PipelineCase(
        "Kandinsky6TI2VAPipeline",
        _six,
        dict(
            prompt_embeds=embeds(1, 7, 12),
            pooled_prompt_embeds=embeds(1, 10, seed=2),
            negative_prompt_embeds=embeds(1, 7, 12, seed=1),
            negative_pooled_prompt_embeds=embeds(1, 10, seed=3),
            height=16,
            width=16,
            num_frames=5,
            sample_audio=False,
        ),
    ),
)
