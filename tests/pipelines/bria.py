"""Bria and FIBO."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler

from tests.zoo import flux as zoo

from .autoencoders import flux2_vae, image_vae, wan_vae
from .case import PipelineCase, dit, picture
from .embeds import embeds, ones
from .encoders import decoder_only, t5, tokenizer

TEXT = dict(prompt="a red cat", negative_prompt="blue", height=16, width=16, max_sequence_length=16)


def _bria() -> dict[str, Any]:
    return dict(
        transformer=dit("BriaTransformer2DModel", zoo.BRIA),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(channels=1, shift_factor=0.0),
        text_encoder=t5(),
        tokenizer=tokenizer(),
    )


def _fibo() -> dict[str, Any]:
    return dict(
        transformer=dit("BriaFiboTransformer2DModel", zoo.BRIA_FIBO, in_channels=4, joint_attention_dim=64),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=wan_vae(),
        text_encoder=decoder_only("SmolLM3", layers=8, head="ForCausalLM", no_rope_layers=[1] * 8),
        tokenizer=tokenizer(),
    )


def _fibo2() -> dict[str, Any]:
    return dict(
        transformer=dit("BriaFibo2Transformer2DModel", zoo.BRIA_FIBO2),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=flux2_vae(4),
        text_encoder=None,
        processor=None,
    )


CASES = (
    PipelineCase("BriaPipeline", _bria, TEXT, cut=True),
    PipelineCase("BriaFiboPipeline", _fibo, TEXT | dict(prompt='{"a": "red cat"}', negative_prompt="blue"), cut=True),
    PipelineCase(
        "BriaFiboEditPipeline",
        _fibo,
        TEXT | dict(prompt='{"edit_instruction": "red cat"}', image=picture(32, 32)),
        cut=True,
    ),
    PipelineCase(
        "BriaFibo2Pipeline",
        _fibo2,
        dict(
            prompt_embeds=embeds(1, 3, 10, 16),
            prompt_embeds_mask=ones(1, 10),
            negative_prompt_embeds=embeds(1, 3, 8, 16, seed=1),
            negative_prompt_embeds_mask=ones(1, 8),
            height=32,
            width=32,
        ),
    ),
)
