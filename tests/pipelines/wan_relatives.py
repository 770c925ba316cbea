"""Pipelines whose transformers are built like Wan's: SkyReels, Lucy, ChronoEdit, AnyFlow and Helios."""

from typing import Any

from diffusers import (
    FlowMapEulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeliosScheduler,
    UniPCMultistepScheduler,
)

from tests.zoo import wan as zoo_wan
from tests.zoo import wan_relatives as zoo

from .autoencoders import wan_vae
from .case import PipelineCase, dit, picture, pictures
from .encoders import clip_vision, clip_vision_projected, image_processor, tokenizer, umt5

TEXT = dict(prompt="a red cat", negative_prompt="blue", height=16, width=16, num_frames=9, max_sequence_length=16)
WAN = zoo_wan.WAN | dict(text_dim=32)
IMAGE = WAN | dict(in_channels=12, image_dim=32, added_kv_proj_dim=24)


def _parts(model_class: str, init: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return (
        dict(
            tokenizer=tokenizer(),
            text_encoder=umt5(),
            vae=wan_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            transformer=dit(model_class, init),
        )
        | changes
    )


def _unipc() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(flow_shift=8.0, use_flow_sigmas=True, prediction_type="flow_prediction")


def _sky(**init: Any) -> dict[str, Any]:
    return _parts("SkyReelsV2Transformer3DModel", WAN | init, scheduler=_unipc())


FORCING = dict(base_num_frames=9, addnoise_condition=0)

CASES = (
    PipelineCase("SkyReelsV2Pipeline", _sky, TEXT),
    PipelineCase(
        "SkyReelsV2ImageToVideoPipeline",
        lambda: (
            _sky(in_channels=12, image_dim=32, added_kv_proj_dim=24)
            | dict(image_encoder=clip_vision_projected(), image_processor=image_processor())
        ),
        TEXT | dict(image=picture(16, 16)),
    ),
    PipelineCase("SkyReelsV2DiffusionForcingPipeline", lambda: _sky(inject_sample_info=True), TEXT | FORCING),
    PipelineCase(
        "SkyReelsV2DiffusionForcingPipeline",
        lambda: _sky(inject_sample_info=True),
        TEXT | FORCING | dict(ar_step=2, causal_block_size=1),
        "asynchronous",
    ),
    PipelineCase(
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        _sky,
        TEXT | FORCING | dict(image=picture(16, 16)),
    ),
    PipelineCase(
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        _sky,
        TEXT | FORCING | dict(video=pictures(9, 16, 16), num_frames=17, overlap_history=5, base_num_frames=13),
    ),
    PipelineCase(
        "LucyEditPipeline",
        lambda: _parts("WanTransformer3DModel", WAN | dict(in_channels=8)),
        TEXT | dict(video=pictures(9, 16, 16)),
    ),
    PipelineCase(
        "ChronoEditPipeline",
        lambda: _parts(
            "ChronoEditTransformer3DModel", IMAGE, image_encoder=clip_vision(), image_processor=image_processor()
        ),
        TEXT | dict(image=picture(16, 16)),
    ),
    PipelineCase(
        "ChronoEditPipeline",
        lambda: _parts(
            "ChronoEditTransformer3DModel",
            IMAGE,
            image_encoder=clip_vision(),
            image_processor=image_processor(),
            scheduler=_unipc(),
        ),
        TEXT | dict(image=picture(16, 16), enable_temporal_reasoning=True, num_temporal_reasoning_steps=1),
        "temporal reasoning",
    ),
    PipelineCase(
        "AnyFlowPipeline",
        lambda: _parts(
            "AnyFlowTransformer3DModel", zoo.ANYFLOW | dict(text_dim=32), scheduler=FlowMapEulerDiscreteScheduler()
        ),
        TEXT | dict(guidance_scale=2.0),
        cut=True,
    ),
    PipelineCase(
        "AnyFlowFARPipeline",
        lambda: _parts(
            "AnyFlowFARTransformer3DModel",
            zoo.ANYFLOW_FAR | dict(text_dim=32),
            scheduler=FlowMapEulerDiscreteScheduler(),
        ),
        TEXT | dict(chunk_partition=[1, 2]),
    ),
    PipelineCase(
        "HeliosPipeline",
        lambda: _parts("HeliosTransformer3DModel", zoo.HELIOS | dict(text_dim=32), scheduler=HeliosScheduler(stages=1)),
        TEXT | dict(num_frames=9, history_sizes=[4, 1, 1], num_latent_frames_per_chunk=3),
    ),
    PipelineCase(
        "HeliosPyramidPipeline",
        lambda: _parts(
            "HeliosTransformer3DModel", zoo.HELIOS | dict(text_dim=32), scheduler=HeliosScheduler(gamma=0.3)
        ),
        TEXT
        | dict(
            height=64,
            width=64,
            num_frames=9,
            history_sizes=[4, 1, 1],
            num_latent_frames_per_chunk=3,
            pyramid_num_inference_steps_list=[1, 1, 1],
        ),
    ),
)
