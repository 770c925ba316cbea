"""Image pipelines: Stable Diffusion 3, PixArt, Sana, Lumina, HiDream, AuraFlow, Z-Image, CogView, DiT."""

from typing import Any

from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)

from tests.zoo import classic, sd3

from .autoencoders import image_vae
from .case import PipelineCase, dit
from .encoders import clip_projected, decoder_only, t5, tokenizer, umt5

SIZE = dict(height=16, width=16)
TEXT = dict(prompt="a red cat", negative_prompt="blue", **SIZE)
SHORT = dict(max_sequence_length=16)


def _pixart() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=t5(8),
        vae=image_vae(),
        transformer=dit("PixArtTransformer2DModel", classic.PIXART, caption_channels=8),
        scheduler=DPMSolverMultistepScheduler(),
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


def _dit() -> dict[str, Any]:
    return dict(
        transformer=dit("DiTTransformer2DModel", classic.DIT, num_embeds_ada_norm=1000),
        vae=image_vae(),
        scheduler=DDIMScheduler(),
    )


CASES = (
    PipelineCase("PixArtSigmaPipeline", _pixart, TEXT | SHORT | dict(use_resolution_binning=False), cut=True),
    PipelineCase("PixArtAlphaPipeline", _pixart, TEXT | SHORT | dict(use_resolution_binning=False), cut=True),
    PipelineCase("HiDreamImagePipeline", _hidream, TEXT | SHORT | dict(height=32, width=32), cut=True, prepare=_small),
    PipelineCase("AuraFlowPipeline", _aura, TEXT | SHORT, cut=True),
    PipelineCase("DiTPipeline", _dit, dict(class_labels=[3]), cut=True),
    PipelineCase(
        "PixArtSigmaPAGPipeline",
        lambda: _pixart() | dict(pag_applied_layers=["blocks.1"]),
        TEXT | SHORT | dict(use_resolution_binning=False),
    ),
)
