"""FLUX.2."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler

from tests.zoo import flux as zoo

from .autoencoders import flux2_vae
from .case import PipelineCase, dit, mask, picture
from .embeds import embeds
from .encoders import decoder_only, tokenizer

EMBEDS = dict(prompt_embeds=embeds(1, 7, 32), height=8, width=8)
TEXT = dict(prompt="a red cat", height=8, width=8, max_sequence_length=16, text_encoder_out_layers=(1,))


def _dev() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=flux2_vae(),
        text_encoder=None,
        tokenizer=None,
        transformer=dit("Flux2Transformer2DModel", zoo.FLUX2),
    )


def _klein(distilled: bool = False) -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=flux2_vae(),
        text_encoder=decoder_only("Qwen3", head="ForCausalLM"),
        tokenizer=tokenizer(),
        transformer=dit("Flux2Transformer2DModel", zoo.FLUX2, guidance_embeds=False),
        is_distilled=distilled,
    )


CASES = (
    PipelineCase("Flux2Pipeline", _dev, EMBEDS),
    PipelineCase("Flux2Pipeline", _dev, EMBEDS | dict(image=picture(64, 64)), "reference"),
    PipelineCase("Flux2KleinPipeline", _klein, TEXT),
    PipelineCase("Flux2KleinPipeline", lambda: _klein(True), TEXT, "distilled"),
    PipelineCase("Flux2KleinInpaintPipeline", _klein, TEXT | dict(image=picture(8, 8), mask_image=mask(8, 8)), steps=3),
    PipelineCase("Flux2KleinKVPipeline", lambda: _klein(True), TEXT | dict(image=picture(64, 64)), steps=3),
)
