"""Wan 2.1 and 2.2."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from tests.zoo import wan as zoo

from .autoencoders import wan_vae
from .case import PipelineCase, dit, mask, picture, pictures
from .encoders import clip_vision, image_processor, tokenizer, umt5

WAN = zoo.WAN | dict(text_dim=32)
IMAGE_TO_VIDEO = WAN | dict(in_channels=12)  # latents, 4 channels of a mask, the picture's latents
VACE = zoo.VACE | dict(in_channels=4, out_channels=4, vace_in_channels=72)

SIZE = dict(height=16, width=16, num_frames=9, max_sequence_length=16)
TEXT = dict(prompt="a red cat", negative_prompt="blue", **SIZE)


def _parts(model_class: str = "WanTransformer3DModel", experts: int = 1, **changes: Any) -> dict[str, Any]:
    init = changes.pop("init", WAN)
    return dict(
        tokenizer=tokenizer(),
        text_encoder=umt5(),
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=dit(model_class, init),
        **(dict(transformer_2=dit(model_class, init), boundary_ratio=0.875) if experts == 2 else {}),
        **changes,
    )


def _image_parts() -> dict[str, Any]:
    init = IMAGE_TO_VIDEO | dict(image_dim=32, added_kv_proj_dim=24)
    return _parts(init=init, image_encoder=clip_vision(), image_processor=image_processor())


def _animate_parts() -> dict[str, Any]:
    init = zoo.ANIMATE | dict(text_dim=32, image_dim=32)
    return _parts(
        "WanAnimateTransformer3DModel", init=init, image_encoder=clip_vision(), image_processor=image_processor()
    )


CASES = (
    PipelineCase("WanPipeline", _parts, TEXT),
    PipelineCase("WanPipeline", _parts, TEXT | dict(guidance_scale=1.0), "no guidance"),
    PipelineCase(
        "WanPipeline",
        lambda: (
            _parts() | dict(scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True))
        ),
        TEXT,
        "unipc",
        steps=4,
    ),
    PipelineCase("WanPipeline", _parts, TEXT | dict(num_videos_per_prompt=2), "two videos", cut=True),
    PipelineCase("WanPipeline", lambda: _parts(experts=2), TEXT, "two experts", steps=4),
    PipelineCase(
        "WanPipeline",
        lambda: _parts(experts=2),
        TEXT | dict(guidance_scale=4.0, guidance_scale_2=1.0),
        "guidance ends with the first expert",
        steps=4,
    ),
    PipelineCase("WanPipeline", lambda: _parts(expand_timesteps=True), TEXT, "expand_timesteps"),
    PipelineCase("WanImageToVideoPipeline", _image_parts, TEXT | dict(image=picture(16, 16))),
    PipelineCase(
        "WanImageToVideoPipeline",
        lambda: _parts(init=IMAGE_TO_VIDEO, experts=2, image_encoder=None, image_processor=None),
        TEXT | dict(image=picture(16, 16)),
        "two experts",
        steps=4,
    ),
    PipelineCase(
        "WanImageToVideoPipeline",
        lambda: _parts(expand_timesteps=True, image_encoder=None, image_processor=None),
        TEXT | dict(image=picture(16, 16)),
        "expand_timesteps",
    ),
    PipelineCase(
        "WanImageToVideoPipeline",
        lambda: (
            _image_parts()
            | dict(
                transformer=dit(
                    "WanTransformer3DModel", IMAGE_TO_VIDEO, image_dim=32, added_kv_proj_dim=24, pos_embed_seq_len=10
                )
            )
        ),
        TEXT | dict(image=picture(16, 16), last_image=picture(16, 16, 1)),
        "first and last frame",
    ),
    PipelineCase(
        "WanVACEPipeline",
        lambda: _parts("WanVACETransformer3DModel", init=VACE),
        TEXT | dict(video=pictures(9, 16, 16), mask=lambda: [mask(16, 16)()] * 9),
    ),
    PipelineCase(
        "WanVACEPipeline",
        lambda: _parts("WanVACETransformer3DModel", init=VACE, experts=2),
        TEXT | dict(reference_images=picture(16, 16), conditioning_scale=0.5),
        "two experts and a reference",
        steps=4,
    ),
    PipelineCase(
        "WanVideoToVideoPipeline",
        _parts,
        dict(prompt="a red cat", height=16, width=16, video=pictures(5, 16, 16), max_sequence_length=16, strength=0.8),
        steps=3,
    ),
    PipelineCase(
        "WanAnimatePipeline",
        _animate_parts,
        dict(
            prompt="a red cat",
            image=picture(16, 16),
            pose_video=pictures(5, 16, 16),
            face_video=pictures(5, 16, 16),
            height=16,
            width=16,
            segment_frame_length=77,
            guidance_scale=2.0,
            max_sequence_length=16,
        ),
    ),
)
