"""Image pipelines: Stable Diffusion 3, PixArt, Sana, Lumina, HiDream, AuraFlow, Z-Image, CogView, DiT."""

from typing import Any

from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)

from tests.zoo import classic, cog, lumina, sana, sd3

from .autoencoders import dc_ae, image_vae
from .case import PipelineCase, dit, mask, picture
from .encoders import clip_projected, decoder_only, t5, tokenizer, umt5

SIZE = dict(height=16, width=16)
TEXT = dict(prompt="a red cat", negative_prompt="blue", **SIZE)
SHORT = dict(max_sequence_length=16)


def _sd3(channels: int = 4, **changes: Any) -> dict[str, Any]:
    sizes = dict(pos_embed_max_size=96, sample_size=32, in_channels=channels, out_channels=channels)
    return dict(
        transformer=dit("SD3Transformer2DModel", sd3.SD3, **sizes),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(channels),
        text_encoder=clip_projected(),
        tokenizer=tokenizer(77),
        text_encoder_2=clip_projected(),
        tokenizer_2=tokenizer(77),
        text_encoder_3=t5(),
        tokenizer_3=tokenizer(77),
        **changes,
    )


def _pixart() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=t5(8),
        vae=image_vae(),
        transformer=dit("PixArtTransformer2DModel", classic.PIXART, caption_channels=8),
        scheduler=DPMSolverMultistepScheduler(),
    )


def _sana() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=decoder_only("Gemma2", 8),
        vae=dc_ae(),
        transformer=dit("SanaTransformer2DModel", sana.SANA),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def _lumina2() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=decoder_only("Gemma2"),
        vae=image_vae(),
        transformer=dit("Lumina2Transformer2DModel", lumina.LUMINA2),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _hidream() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(blocks=2),
        text_encoder=clip_projected(projection=4),
        tokenizer=tokenizer(77),
        text_encoder_2=clip_projected(projection=4),
        tokenizer_2=tokenizer(77),
        text_encoder_3=t5(8),
        tokenizer_3=tokenizer(77),
        text_encoder_4=decoder_only("Llama", 8, layers=3, head="ForCausalLM"),
        tokenizer_4=tokenizer(77),
        transformer=dit(
            "HiDreamImageTransformer2DModel", sd3.HIDREAM, caption_channels=(8, 8), max_resolution=(32, 32)
        ),
    )


def _small(pipeline: Any) -> None:
    """HiDream scales every size up to the area of its default size."""
    pipeline.default_sample_size = 16


def _aura() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=umt5(16),
        vae=image_vae(),
        transformer=dit("AuraFlowTransformer2DModel", sd3.AURA),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _z_image() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(channels=16, blocks=2),
        text_encoder=decoder_only("Qwen3", 16),
        tokenizer=tokenizer(),
        transformer=dit("ZImageTransformer2DModel", lumina.Z_IMAGE),
    )


def _cogview4() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=decoder_only("Glm", 8),
        vae=image_vae(),
        transformer=dit("CogView4Transformer2DModel", cog.VIEW4),
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
        ),
    )


def _dit() -> dict[str, Any]:
    return dict(
        transformer=dit("DiTTransformer2DModel", classic.DIT, num_embeds_ada_norm=1000),
        vae=image_vae(),
        scheduler=DDIMScheduler(),
    )


CASES = (
    PipelineCase("StableDiffusion3Pipeline", _sd3, TEXT | SHORT, cut=True),
    PipelineCase("StableDiffusion3Pipeline", _sd3, TEXT | SHORT | dict(guidance_scale=1.0), "no guidance"),
    PipelineCase(
        "StableDiffusion3Pipeline", _sd3, TEXT | SHORT | dict(num_images_per_prompt=2), "two images", cut=True
    ),
    PipelineCase(
        "StableDiffusion3Pipeline",
        _sd3,
        TEXT | SHORT | dict(skip_guidance_layers=[1], skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0),
        "skip layers",
        cut=True,
    ),
    PipelineCase(
        "StableDiffusion3Img2ImgPipeline",
        _sd3,
        TEXT | SHORT | dict(image=picture(16, 16), strength=0.7),
        cut=True,
        steps=3,
    ),
    PipelineCase(
        "StableDiffusion3InpaintPipeline",
        lambda: _sd3(channels=16),
        TEXT | SHORT | dict(image=picture(16, 16), mask_image=mask(16, 16), strength=0.7),
        cut=True,
        steps=3,
    ),
    PipelineCase("PixArtSigmaPipeline", _pixart, TEXT | SHORT | dict(use_resolution_binning=False), cut=True),
    PipelineCase("PixArtAlphaPipeline", _pixart, TEXT | SHORT | dict(use_resolution_binning=False), cut=True),
    PipelineCase(
        "SanaPipeline",
        _sana,
        TEXT | SHORT | dict(use_resolution_binning=False, complex_human_instruction=None, height=32, width=32),
        cut=True,
    ),
    PipelineCase("Lumina2Pipeline", _lumina2, TEXT | SHORT),
    PipelineCase("HiDreamImagePipeline", _hidream, TEXT | SHORT | dict(height=32, width=32), cut=True, prepare=_small),
    PipelineCase("AuraFlowPipeline", _aura, TEXT | SHORT, cut=True),
    PipelineCase("ZImagePipeline", _z_image, TEXT | SHORT | dict(height=32, width=32, guidance_scale=3.0), cut=True),
    PipelineCase(
        "ZImagePipeline",
        _z_image,
        TEXT | SHORT | dict(height=32, width=32, guidance_scale=3.0, cfg_truncation=0.5),
        "guidance ends early",
        cut=True,
        steps=4,
    ),
    PipelineCase("CogView4Pipeline", _cogview4, TEXT | SHORT),
    PipelineCase("DiTPipeline", _dit, dict(class_labels=[3]), cut=True),
)
