"""Qwen-Image."""

from typing import Any

from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler, QwenImageControlNetModel

from tests.zoo import qwen as zoo
from tests.zoo.case import without

from .autoencoders import qwen_vae
from .case import PipelineCase, dit, mask, picture, small_area
from .embeds import embeds, ones
from .encoders import qwen25_vl, text_processor, tokenizer

SIZE = dict(height=32, width=32, true_cfg_scale=2.0)
TEXT = dict(prompt="a red cat", negative_prompt="blue", max_sequence_length=16, **SIZE)
IMAGE = dict(image=picture(32, 32), strength=0.7)
MASK = dict(mask_image=mask(32, 32))
# What the text encoder would make of a prompt and a picture.
EMBEDS = dict(
    prompt_embeds=embeds(1, 7, 32),
    prompt_embeds_mask=ones(1, 7),
    negative_prompt_embeds=embeds(1, 5, 32, seed=1),
    negative_prompt_embeds_mask=ones(1, 5),
    max_sequence_length=16,
    **SIZE,
)


def _qwen(**changes: Any) -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=qwen_vae(),
        text_encoder=qwen25_vl(),
        tokenizer=tokenizer(),
        transformer=dit("QwenImageTransformer2DModel", zoo.QWEN, joint_attention_dim=32, **changes),
    )


def _edit(**changes: Any) -> dict[str, Any]:
    return _qwen(**changes) | dict(text_encoder=None, tokenizer=None, processor=None)


def _controlled(extra: int = 0) -> dict[str, Any]:
    init = without(zoo.QWEN, "guidance_embeds") | dict(joint_attention_dim=32, num_layers=2)
    return _qwen() | dict(controlnet=QwenImageControlNetModel(**init, extra_condition_channels=extra))


def _qwen21() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1] * 4,
            latents_std=[1.5] * 4,
        ),
        text_encoder=None,
        processor=text_processor(),
        transformer=dit("QwenImage21Transformer2DModel", zoo.QWEN21),
    )


CASES = (
    PipelineCase("QwenImagePipeline", _qwen, TEXT),
    PipelineCase("QwenImagePipeline", _qwen, TEXT | dict(true_cfg_scale=1.0), "no guidance"),
    PipelineCase("QwenImagePipeline", _qwen, TEXT | dict(num_images_per_prompt=2), "two images", cut=True),
    PipelineCase("QwenImageImg2ImgPipeline", _qwen, TEXT | IMAGE, steps=3),
    PipelineCase("QwenImageInpaintPipeline", _qwen, TEXT | IMAGE | MASK, steps=3),
    PipelineCase("QwenImageControlNetPipeline", _controlled, TEXT | dict(control_image=picture(32, 32))),
    PipelineCase(
        "QwenImageControlNetInpaintPipeline",
        lambda: _controlled(extra=4),
        TEXT | dict(control_image=picture(32, 32), control_mask=mask(32, 32)),
    ),
    PipelineCase("QwenImageEditPipeline", _edit, EMBEDS | dict(image=picture(32, 32)), prepare=small_area),
    PipelineCase("QwenImageEditInpaintPipeline", _edit, EMBEDS | IMAGE | MASK, steps=3, prepare=small_area),
    PipelineCase(
        "QwenImageEditPlusPipeline",
        _edit,
        EMBEDS | dict(image=lambda: [picture(32, 32)(), picture(32, 32, 1)()]),
        prepare=small_area,
    ),
    PipelineCase(
        "QwenImageLayeredPipeline",
        lambda: _edit(use_additional_t_cond=True, use_layer3d_rope=True) | dict(text_encoder=qwen25_vl()),
        without(EMBEDS, "height", "width") | dict(prompt="a red cat", image=picture(32, 32), layers=2),
        prepare=small_area,
    ),
    PipelineCase("QwenImage21Pipeline", _qwen21, without(EMBEDS, "max_sequence_length")),
)
