"""Stable Diffusion 3."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, SD3ControlNetModel

from tests.zoo import sd3 as zoo

from .autoencoders import image_vae
from .case import PipelineCase, dit, mask, picture
from .encoders import clip_projected, t5, tokenizer

TEXT = dict(prompt="a red cat", negative_prompt="blue", height=16, width=16, max_sequence_length=16)
IMAGE = dict(image=picture(16, 16), strength=0.7)
MASK = dict(mask_image=mask(16, 16))


def _sd3(channels: int = 4, **parts: Any) -> dict[str, Any]:
    sizes = dict(pos_embed_max_size=96, sample_size=32, in_channels=channels, out_channels=channels)
    return dict(
        transformer=dit("SD3Transformer2DModel", zoo.SD3, **sizes),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(channels),
        text_encoder=clip_projected(),
        tokenizer=tokenizer(77),
        text_encoder_2=clip_projected(),
        tokenizer_2=tokenizer(77),
        text_encoder_3=t5(),
        tokenizer_3=tokenizer(77),
        **parts,
    )


def _controlnet(extra: int = 0) -> SD3ControlNetModel:
    init = zoo.SD3 | dict(pos_embed_max_size=96, sample_size=32, num_layers=2)
    return SD3ControlNetModel(**init, extra_conditioning_channels=extra)


CASES = (
    PipelineCase("StableDiffusion3Pipeline", _sd3, TEXT, cut=True),
    PipelineCase("StableDiffusion3Pipeline", _sd3, TEXT | dict(guidance_scale=1.0), "no guidance"),
    PipelineCase("StableDiffusion3Pipeline", _sd3, TEXT | dict(num_images_per_prompt=2), "two images", cut=True),
    PipelineCase(
        "StableDiffusion3Pipeline",
        _sd3,
        TEXT | dict(skip_guidance_layers=[1], skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0),
        "skip layers",
        cut=True,
    ),
    PipelineCase("StableDiffusion3Img2ImgPipeline", _sd3, TEXT | IMAGE, cut=True, steps=3),
    PipelineCase("StableDiffusion3InpaintPipeline", lambda: _sd3(channels=16), TEXT | IMAGE | MASK, cut=True, steps=3),
    PipelineCase(
        "StableDiffusion3ControlNetPipeline",
        lambda: _sd3(controlnet=_controlnet()),
        TEXT | dict(control_image=picture(16, 16)),
        cut=True,
    ),
    PipelineCase(
        "StableDiffusion3ControlNetInpaintingPipeline",
        lambda: _sd3(controlnet=_controlnet(extra=1)),
        TEXT | dict(control_image=picture(16, 16), control_mask=mask(16, 16)),
        cut=True,
    ),
    PipelineCase("StableDiffusion3PAGPipeline", lambda: _sd3(pag_applied_layers=["blocks.0"]), TEXT, cut=False),
    PipelineCase(
        "StableDiffusion3PAGImg2ImgPipeline", lambda: _sd3(pag_applied_layers=["blocks.0"]), TEXT | IMAGE, steps=3
    ),
)
