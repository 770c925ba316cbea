"""Image models without a common ancestor: PRX, Ovis, Krea 2, ERNIE-Image, Ideogram 4, JoyImage, Nucleus, LongCat, GLM."""

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from transformers import Qwen3VLConfig, Qwen3VLModel

from tests.zoo import cog, qwen
from tests.zoo import flux as zoo_flux
from tests.zoo import single_stream as zoo

from .autoencoders import flux2_vae, image_vae, qwen_vae, wan_vae
from .case import PipelineCase, dit, picture, small_area
from .embeds import embeds, ones
from .encoders import VOCABULARY, decoder_only, qwen25_vl, t5, text_processor, tokenizer

SIZE = dict(height=32, width=32)
TEXT = dict(prompt="a red cat", negative_prompt="blue", **SIZE)


def _prompts(*shape: int, mask: bool = True) -> dict[str, Any]:
    """Embeddings of a prompt and a negative prompt, and their masks."""
    found: dict[str, Any] = dict(prompt_embeds=embeds(1, *shape), negative_prompt_embeds=embeds(1, *shape, seed=1))
    if mask:
        keep = ones(1, shape[0], dtype=torch.bool)
        found |= dict(prompt_embeds_mask=keep, negative_prompt_embeds_mask=keep)
    return found


def _prx() -> dict[str, Any]:
    return dict(
        transformer=dit("PRXTransformer2DModel", zoo.PRX),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=t5(20),
        tokenizer=tokenizer(),
        vae=image_vae(channels=16),
    )


def _prx_pixel() -> dict[str, Any]:
    return dict(
        transformer=dit("PRXTransformer2DModel", zoo.PRX, in_channels=3, patch_size=16),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=decoder_only("Qwen3", 20),
        tokenizer=tokenizer(),
    )


def _ovis() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(channels=1),
        text_encoder=decoder_only("Qwen3"),
        tokenizer=tokenizer(),
        transformer=dit("OvisImageTransformer2DModel", zoo_flux.OVIS),
    )


def _krea2() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=qwen_vae(1),
        text_encoder=None,
        tokenizer=tokenizer(),
        transformer=dit("Krea2Transformer2DModel", zoo.KREA2),
        text_encoder_select_layers=(0, 1, 2),
    )


def _ernie() -> dict[str, Any]:
    return dict(
        transformer=dit("ErnieImageTransformer2DModel", zoo.ERNIE),
        vae=flux2_vae(),
        text_encoder=decoder_only("Mistral", 12, layers=3),
        tokenizer=tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _ideogram() -> dict[str, Any]:
    text = dict(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=37,
        num_hidden_layers=36,  # the pipeline takes the states of 13 layers
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=12,
        rope_scaling={"mrope_section": [2, 2, 2], "rope_type": "default"},
    )
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=24, deepstack_visual_indexes=[0]
    )
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=flux2_vae(4),
        text_encoder=Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision)),
        tokenizer=tokenizer(),
        transformer=dit("Ideogram4Transformer2DModel", zoo.IDEOGRAM4, llm_features_dim=13 * 24),
        unconditional_transformer=dit("Ideogram4Transformer2DModel", zoo.IDEOGRAM4, llm_features_dim=13 * 24),
    )


def _joy(plus: bool = False) -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=wan_vae(16),
        text_encoder=None,
        tokenizer=None,
        transformer=dit(f"JoyImageEdit{'Plus' if plus else ''}Transformer3DModel", zoo.JOY),
        processor=None,
    )


def _nucleus(**changes: Any) -> dict[str, Any]:
    return dict(
        transformer=dit("NucleusMoEImageTransformer2DModel", qwen.NUCLEUS_MOE, **changes),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=qwen_vae(),
        text_encoder=None,
        processor=None,
    )


def _longcat() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(channels=16),
        text_encoder=qwen25_vl(),
        tokenizer=tokenizer(),
        text_processor=text_processor(),
        transformer=dit("LongCatImageTransformer2DModel", zoo_flux.FLUX, in_channels=64),
    )


def _glm() -> dict[str, Any]:
    return dict(
        tokenizer=None,
        processor=None,
        text_encoder=None,
        vision_language_encoder=None,
        vae=image_vae(latents_mean=[0.1] * 4, latents_std=[1.5] * 4),
        transformer=dit("GlmImageTransformer2DModel", cog.GLM),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _prepare_edit(pipeline: Any) -> None:
    small_area(pipeline)
    pipeline._encode_prompt = lambda *_, **__: embeds(1, 7, 32)()


def _prepare_edit_plus(pipeline: Any) -> None:
    _one_size(pipeline.image_processor)
    pipeline.encode_prompt_multiple_images = _encode_nothing


def _one_size(processor: Any) -> None:
    """JoyImage scales every picture to a megapixel."""
    processor.get_default_height_width = lambda *_: (32, 32)


def _encode_nothing(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for a text encoder that needs a processor of pictures."""
    return embeds(1, 12, 16)(), ones(1, 12)()


CASES = (
    PipelineCase("PRXPipeline", _prx, TEXT | dict(use_resolution_binning=False, skip_text_cleaning=True), cut=True),
    PipelineCase("PRXPixelPipeline", _prx_pixel, TEXT | dict(use_resolution_binning=False), cut=True),
    PipelineCase("OvisImagePipeline", _ovis, TEXT | dict(height=8, width=8)),
    PipelineCase("Krea2Pipeline", _krea2, SIZE | _prompts(6, 3, 12)),
    PipelineCase("ErnieImagePipeline", _ernie, TEXT | dict(use_pe=False), cut=True),
    PipelineCase(
        "Ideogram4Pipeline",
        _ideogram,
        SIZE | dict(prompt="a red cat", guidance_schedule=(7.0, 3.0), max_sequence_length=64),
    ),
    PipelineCase(
        "JoyImageEditPipeline",
        _joy,
        SIZE | _prompts(12, 16) | dict(image=picture(32, 32)),
        prepare=lambda pipeline: _one_size(pipeline.vae_image_processor),
    ),
    PipelineCase(
        "JoyImageEditPlusPipeline",
        lambda: _joy(True),
        SIZE | dict(prompt="a red cat", negative_prompt="blue", images=lambda: [[picture(32, 32)()]]),
        cut=True,
        prepare=_prepare_edit_plus,
    ),
    PipelineCase("NucleusMoEImagePipeline", _nucleus, SIZE | _prompts(7, 16)),
    PipelineCase("LongCatImagePipeline", _longcat, TEXT | dict(height=8, width=8, enable_prompt_rewrite=False)),
    PipelineCase(
        "LongCatImageEditPipeline",
        _longcat,
        dict(prompt="a red cat", negative_prompt="blue", image=picture(32, 32)),
        prepare=_prepare_edit,
    ),
    PipelineCase(
        "GlmImagePipeline",
        _glm,
        SIZE
        | dict(
            prompt_embeds=embeds(1, 6, 8),
            negative_prompt_embeds=embeds(1, 6, 8, seed=1),
            prior_token_ids=lambda: torch.arange(256)[None] % 64,
        ),
    ),
    PipelineCase(
        "GlmImagePipeline",
        _glm,
        SIZE
        | dict(
            prompt_embeds=embeds(1, 6, 8),
            negative_prompt_embeds=embeds(1, 6, 8, seed=1),
            prior_token_ids=lambda: torch.arange(256)[None] % 64,
            image=lambda: [picture(32, 32)()],
            prior_token_image_ids=lambda: [torch.arange(256) % 64],
            source_image_grid_thw=lambda: [torch.tensor([[1, 16, 16]])],
        ),
        "cache of a picture",
    ),
)
