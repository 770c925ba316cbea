"""CogVideoX and CogView."""

from typing import Any

from diffusers import CogVideoXDDIMScheduler, DDIMScheduler, FlowMatchEulerDiscreteScheduler

from tests.zoo import cog as zoo

from .autoencoders import cogvideo_vae, image_vae
from .case import PipelineCase, dit, picture, pictures
from .encoders import decoder_only, t5, tokenizer

SIZE = dict(height=16, width=16, max_sequence_length=16)
TEXT = dict(prompt="a red cat", negative_prompt="blue", **SIZE)
VIDEO_SIZES = dict(max_text_seq_length=16, sample_width=2, sample_height=2, sample_frames=9)


def _video(**changes: Any) -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=t5(8),
        vae=cogvideo_vae(),
        transformer=dit("CogVideoXTransformer3DModel", zoo.VIDEOX, **VIDEO_SIZES, **changes),
        scheduler=CogVideoXDDIMScheduler(),
    )


def _view4(**changes: Any) -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=decoder_only("Glm", 8),
        vae=image_vae(),
        transformer=dit("CogView4Transformer2DModel", zoo.VIEW4, **changes),
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
        ),
    )


def _view3() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=t5(8),
        vae=image_vae(),
        transformer=dit("CogView3PlusTransformer2DModel", zoo.VIEW3, pos_embed_max_size=32),
        scheduler=CogVideoXDDIMScheduler(),
    )


CASES = (
    PipelineCase("CogVideoXPipeline", _video, TEXT | dict(num_frames=9), cut=True),
    PipelineCase(
        "CogVideoXPipeline", _video, TEXT | dict(num_frames=9, use_dynamic_cfg=True), "dynamic guidance", cut=True
    ),
    PipelineCase(
        "CogVideoXImageToVideoPipeline",
        lambda: _video(
            in_channels=8,
            attention_head_dim=16,
            use_learned_positional_embeddings=True,
            use_rotary_positional_embeddings=True,
        ),
        TEXT | dict(num_frames=9, image=picture(16, 16)),
        cut=True,
    ),
    PipelineCase("CogVideoXVideoToVideoPipeline", _video, TEXT | dict(video=pictures(9, 16, 16)), cut=True, steps=3),
    PipelineCase(
        "CogVideoXFunControlPipeline",
        lambda: _video(in_channels=8) | dict(scheduler=DDIMScheduler()),
        TEXT | dict(control_video=pictures(9, 16, 16)),
        cut=True,
    ),
    PipelineCase("CogView4Pipeline", _view4, TEXT),
    PipelineCase("CogView4ControlPipeline", lambda: _view4(in_channels=8), TEXT | dict(control_image=picture(16, 16))),
    PipelineCase("CogView3PlusPipeline", _view3, TEXT, cut=True),
)
