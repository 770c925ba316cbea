"""FLUX and what was built from it: Chroma."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, FluxControlNetModel

from tests.zoo import flux as zoo

from .autoencoders import image_vae
from .case import PipelineCase, dit, mask, picture
from .encoders import clip, t5, tokenizer

SIZE = dict(height=8, width=8, max_sequence_length=16)
TEXT = dict(prompt="a blue circle", **SIZE)


def _flux(**changes: Any) -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=clip(),
        tokenizer=tokenizer(77),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(48),
        vae=image_vae(channels=1),
        transformer=dit("FluxTransformer2DModel", zoo.FLUX, guidance_embeds=True, **changes),
    )


def _controlnet() -> FluxControlNetModel:
    return FluxControlNetModel(**zoo.FLUX | dict(num_layers=2, num_single_layers=2, guidance_embeds=True))


def _chroma() -> dict[str, Any]:
    transformer = dit("ChromaTransformer2DModel", zoo.CHROMA)
    transformer.register_to_config(guidance_embeds=False)  # as the checkpoint's file does; the inpainting pipeline asks
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=t5(),
        tokenizer=tokenizer(48),
        vae=image_vae(channels=1),
        transformer=transformer,
    )


CHROMA = TEXT | dict(negative_prompt="red", guidance_scale=3.0)
IMAGE = dict(image=picture(8, 8), strength=0.7)
MASK = dict(mask_image=mask(8, 8))
CONTROL = dict(control_image=picture(8, 8), controlnet_conditioning_scale=0.8)

# Rows of one example and one query of two pictures, the last of which is to be painted.
CLOZE = dict(
    task_prompt="a red cat",
    content_prompt="the moon",
    image=lambda: [[picture(16, 16)(), picture(16, 16, 1)()], [picture(16, 16, 2)(), None]],
    max_sequence_length=16,
)

CASES = (
    PipelineCase("FluxPipeline", _flux, TEXT),
    PipelineCase("FluxPipeline", _flux, TEXT | dict(negative_prompt="red", true_cfg_scale=3.0), "true_cfg"),
    PipelineCase("FluxPipeline", _flux, TEXT | dict(num_images_per_prompt=2), "two images", cut=True),
    PipelineCase("FluxKontextPipeline", _flux, TEXT | dict(image=picture(8, 8), _auto_resize=False, max_area=64)),
    PipelineCase(
        "FluxKontextInpaintPipeline",
        _flux,
        TEXT | IMAGE | MASK | dict(_auto_resize=False, max_area=64),
        steps=3,
    ),
    PipelineCase(
        "FluxFillPipeline",
        lambda: _flux(in_channels=4 + 4 + 4, out_channels=4),
        TEXT | MASK | dict(image=picture(8, 8)),
    ),
    PipelineCase("FluxImg2ImgPipeline", _flux, TEXT | IMAGE, steps=3),
    PipelineCase("FluxInpaintPipeline", _flux, TEXT | IMAGE | MASK, steps=3),
    PipelineCase(
        "FluxControlPipeline", lambda: _flux(in_channels=8, out_channels=4), TEXT | dict(control_image=picture(8, 8))
    ),
    PipelineCase(
        "FluxControlImg2ImgPipeline",
        lambda: _flux(in_channels=8, out_channels=4),
        TEXT | IMAGE | dict(control_image=picture(8, 8)),
        steps=3,
    ),
    PipelineCase(
        "FluxControlInpaintPipeline",
        lambda: _flux(in_channels=8, out_channels=4),
        TEXT | IMAGE | MASK | dict(control_image=picture(8, 8)),
        steps=3,
    ),
    PipelineCase("FluxControlNetPipeline", lambda: _flux() | dict(controlnet=_controlnet()), TEXT | CONTROL),
    PipelineCase(
        "FluxControlNetImg2ImgPipeline",
        lambda: _flux() | dict(controlnet=_controlnet()),
        TEXT | IMAGE | CONTROL,
        steps=3,
    ),
    PipelineCase(
        "FluxControlNetInpaintPipeline",
        lambda: _flux() | dict(controlnet=_controlnet()),
        TEXT | IMAGE | MASK | CONTROL,
        steps=3,
    ),
    PipelineCase("ChromaPipeline", _chroma, CHROMA),
    PipelineCase("ChromaImg2ImgPipeline", _chroma, CHROMA | IMAGE, steps=3),
    PipelineCase("ChromaInpaintPipeline", _chroma, CHROMA | IMAGE | MASK, steps=3),
    PipelineCase(
        "VisualClozeGenerationPipeline",
        lambda: _flux(in_channels=12, out_channels=4) | dict(resolution=16),
        CLOZE,
    ),
    PipelineCase(
        "VisualClozePipeline",
        lambda: _flux(in_channels=12, out_channels=4) | dict(resolution=16),
        CLOZE | dict(upsampling_height=16, upsampling_width=16, upsampling_strength=0.6),
        steps=3,
    ),
)
