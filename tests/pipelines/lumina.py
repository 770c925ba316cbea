"""Lumina and Z-Image."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, ZImageControlNetModel

from tests.zoo import lumina as zoo

from .autoencoders import image_vae
from .case import PipelineCase, dit, mask, picture
from .encoders import decoder_only, tokenizer

TEXT = dict(prompt="a red cat", negative_prompt="blue", height=16, width=16, max_sequence_length=16)
Z_TEXT = TEXT | dict(height=32, width=32, guidance_scale=3.0)
Z_IMAGE = dict(image=picture(32, 32), strength=0.7)
CONTROL = dict(control_image=picture(32, 32))


def _lumina2() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=decoder_only("Gemma2"),
        vae=image_vae(),
        transformer=dit("Lumina2Transformer2DModel", zoo.LUMINA2),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _lumina() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=decoder_only("Gemma"),
        vae=image_vae(),
        transformer=dit("LuminaNextDiT2DModel", zoo.LUMINA_NEXT, learn_sigma=True),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _z_image(**parts: Any) -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(channels=16, blocks=2),
        text_encoder=decoder_only("Qwen3", 16),
        tokenizer=tokenizer(),
        transformer=dit("ZImageTransformer2DModel", zoo.Z_IMAGE),
        **parts,
    )


def _z_controlnet(channels: int = 16) -> ZImageControlNetModel:
    return ZImageControlNetModel(
        control_layers_places=[0, 2],
        control_refiner_layers_places=[0, 1],
        control_in_dim=channels,
        add_control_noise_refiner="control_noise_refiner",
        **{name: zoo.Z_IMAGE[name] for name in ("dim", "n_refiner_layers", "n_heads", "n_kv_heads", "qk_norm")},
    )


CASES = (
    PipelineCase("Lumina2Pipeline", _lumina2, TEXT),
    PipelineCase("LuminaPipeline", _lumina, TEXT | dict(clean_caption=False), cut=True),
    PipelineCase("ZImagePipeline", _z_image, Z_TEXT, cut=True),
    PipelineCase(
        "ZImagePipeline", _z_image, Z_TEXT | dict(cfg_truncation=0.5), "guidance ends early", cut=True, steps=4
    ),
    PipelineCase("ZImageImg2ImgPipeline", _z_image, Z_TEXT | Z_IMAGE, cut=True, steps=3),
    PipelineCase(
        "ZImageInpaintPipeline", _z_image, Z_TEXT | Z_IMAGE | dict(mask_image=mask(32, 32)), cut=True, steps=3
    ),
    PipelineCase("ZImageControlNetPipeline", lambda: _z_image(controlnet=_z_controlnet()), Z_TEXT | CONTROL, cut=True),
    PipelineCase(
        "ZImageControlNetInpaintPipeline",
        lambda: _z_image(controlnet=_z_controlnet(33)),
        Z_TEXT | CONTROL | dict(image=picture(32, 32), mask_image=mask(32, 32)),
        cut=True,
    ),
)
