"""HunyuanDiT, HunyuanImage, HunyuanVideo and its relatives."""

from typing import Any

from diffusers import (
    AdaptiveProjectedMixGuidance,
    AutoencoderKLHunyuanImage,
    AutoencoderKLHunyuanImageRefiner,
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    HunyuanDiT2DControlNetModel,
)
from transformers import BertConfig, BertModel, SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from tests.zoo import hunyuan as zoo

from .autoencoders import hunyuan_video_vae, image_vae
from .case import PipelineCase, dit, picture
from .embeds import embeds, ones
from .encoders import VOCABULARY, clip, decoder_only, t5, tokenizer

SIZE = dict(height=16, width=16)
TEXT = dict(prompt="a red cat", negative_prompt="blue", **SIZE)
VIDEO = TEXT | dict(
    num_frames=9, max_sequence_length=16, prompt_template={"template": "system {} user", "crop_start": 1}
)


def _dit_parts(**parts: Any) -> dict[str, Any]:
    bert = BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    return dict(
        vae=image_vae(),
        text_encoder=BertModel(bert),
        tokenizer=tokenizer(),
        text_encoder_2=t5(8),
        tokenizer_2=tokenizer(),
        transformer=dit("HunyuanDiT2DModel", zoo.DIT, text_len=77, text_len_t5=256),
        scheduler=DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **parts,
    )


def _dit_controlnet() -> HunyuanDiT2DControlNetModel:
    return HunyuanDiT2DControlNetModel(
        in_channels=4,
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        hidden_size=16,
        sample_size=8,
        transformer_num_layers=6,
        cross_attention_dim=8,
        cross_attention_dim_t5=8,
        pooled_projection_dim=4,
        text_len=77,
        text_len_t5=256,
        use_style_cond_and_image_meta_size=False,
    )


def _video(**changes: Any) -> dict[str, Any]:
    init = changes.pop("init", zoo.VIDEO)
    model_class = changes.pop("model_class", "HunyuanVideoTransformer3DModel")
    return dict(
        text_encoder=decoder_only("Llama", 16, layers=4),
        tokenizer=tokenizer(),
        transformer=dit(model_class, init),
        vae=hunyuan_video_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=clip(8),
        tokenizer_2=tokenizer(),
        **changes,
    )


def _video15(task: str) -> dict[str, Any]:
    return dict(
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        guider=ClassifierFreeGuidance(guidance_scale=3.0),
        vae=AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, spatial_compression_ratio=8
        ),
        transformer=dit("HunyuanVideo15Transformer3DModel", zoo.VIDEO15, in_channels=9, task_type=task),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def _image(**changes: Any) -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=8,
            sample_size=16,
            scaling_factor=0.7,
        ),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=dit("HunyuanImageTransformer2DModel", zoo.IMAGE, text_embed_2_dim=8, **changes),
    )


def _refiner() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
        vae=AutoencoderKLHunyuanImageRefiner(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            spatial_compression_ratio=8,
        ),
        text_encoder=None,
        tokenizer=None,
        transformer=dit(
            "HunyuanImageTransformer2DModel",
            zoo.IMAGE,
            in_channels=16,
            out_channels=8,
            patch_size=(1, 1, 1),
            rope_axes_dim=(2, 2, 4),
            guidance_embeds=True,
        ),
    )


def _siglip(width: int = 12) -> dict[str, Any]:
    config = SiglipVisionConfig(
        hidden_size=width, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return dict(
        image_encoder=SiglipVisionModel(config),
        feature_extractor=SiglipImageProcessor(size={"height": 16, "width": 16}),
    )


EMBEDS_IMAGE = dict(
    prompt_embeds=embeds(1, 6, 16),
    prompt_embeds_mask=ones(1, 6),
    prompt_embeds_2=embeds(1, 4, 8),
    prompt_embeds_mask_2=ones(1, 4),
    negative_prompt_embeds=embeds(1, 6, 16, seed=1),
    negative_prompt_embeds_mask=ones(1, 6),
    negative_prompt_embeds_2=embeds(1, 4, 8, seed=1),
    negative_prompt_embeds_mask_2=ones(1, 4),
)

CASES = (
    PipelineCase("HunyuanVideoPipeline", _video, VIDEO),
    PipelineCase("HunyuanVideoPipeline", _video, VIDEO | dict(true_cfg_scale=2.0), "true_cfg"),
    PipelineCase(
        "HunyuanSkyreelsImageToVideoPipeline",
        lambda: _video(init=zoo.VIDEO | dict(in_channels=8, guidance_embeds=False)),
        VIDEO | dict(image=picture(16, 16), true_cfg_scale=2.0),
    ),
    PipelineCase("HunyuanDiTPipeline", _dit_parts, TEXT | dict(use_resolution_binning=False), cut=True),
    PipelineCase(
        "HunyuanDiTPAGPipeline",
        lambda: _dit_parts(pag_applied_layers=["blocks.1"]),
        TEXT | dict(use_resolution_binning=False),
    ),
    PipelineCase(
        "HunyuanDiTControlNetPipeline",
        lambda: (
            _dit_parts(controlnet=_dit_controlnet())
            | dict(
                transformer=dit(
                    "HunyuanDiT2DModel", zoo.DIT, text_len=77, text_len_t5=256, use_style_cond_and_image_meta_size=False
                )
            )
        ),
        TEXT | dict(use_resolution_binning=False, control_image=picture(16, 16)),
        cut=True,
    ),
    PipelineCase(
        "HunyuanImagePipeline",
        lambda: _image() | dict(guider=AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1)),
        SIZE | EMBEDS_IMAGE,
        steps=3,
    ),
    PipelineCase(
        "HunyuanImagePipeline",
        lambda: _image(guidance_embeds=True, use_meanflow=True),
        SIZE | EMBEDS_IMAGE,
        "distilled",
    ),
    PipelineCase(
        "HunyuanImageRefinerPipeline",
        _refiner,
        SIZE | dict(image=picture(16, 16), prompt_embeds=embeds(1, 6, 16), prompt_embeds_mask=ones(1, 6)),
    ),
    PipelineCase("HunyuanVideo15Pipeline", lambda: _video15("t2v"), SIZE | EMBEDS_IMAGE | dict(num_frames=5)),
    PipelineCase(
        "HunyuanVideo15ImageToVideoPipeline",
        lambda: _video15("i2v") | _siglip(),
        EMBEDS_IMAGE | dict(num_frames=5, image=picture(16, 16)),
    ),
    PipelineCase(
        "HunyuanVideoFramepackPipeline",
        lambda: _video(model_class="HunyuanVideoFramepackTransformer3DModel", init=zoo.FRAMEPACK) | _siglip(16),
        VIDEO | dict(image=picture(16, 16), latent_window_size=3),
    ),
)
