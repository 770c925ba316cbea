"""LTX and LTX-2: video, and video with sound."""

from typing import Any

from diffusers import AutoencoderKLLTX2Audio, FlowMatchEulerDiscreteScheduler, LTXEulerAncestralRFScheduler
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from tests.zoo import video as zoo
from tests.zoo.case import without

from .autoencoders import ltx2_vae, ltx_vae
from .case import PipelineCase, dit, picture
from .encoders import connectors, gemma3, t5, tokenizer

TEXT = dict(
    prompt="a red cat",
    negative_prompt="blue",
    height=32,
    width=32,
    num_frames=9,
    max_sequence_length=16,
    frame_rate=25.0,
)
QUIET = dict(stg_scale=0.0, modality_scale=1.0, audio_stg_scale=0.0, audio_modality_scale=1.0)
LOUD = dict(stg_scale=1.0, modality_scale=3.0, audio_stg_scale=1.0, spatio_temporal_guidance_blocks=[2])
PAIRED = without(TEXT, "negative_prompt")


def _ltx() -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=ltx_vae(),
        text_encoder=t5(16),
        tokenizer=tokenizer(),
        transformer=dit("LTXVideoTransformer3DModel", zoo.LTX),
    )


def _ltx2(**changes: Any) -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=ltx2_vae(),
        audio_vae=AutoencoderKLLTX2Audio(
            base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8
        ),
        text_encoder=gemma3(),
        tokenizer=tokenizer(),
        connectors=connectors(),
        transformer=dit("LTX2VideoTransformer3DModel", zoo.LTX2, caption_channels=32, **changes),
        vocoder=LTX2Vocoder(
            in_channels=16,
            hidden_channels=8,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
        ),
    )


CASES = (
    PipelineCase("LTXPipeline", _ltx, TEXT, cut=True),
    PipelineCase("LTXPipeline", _ltx, TEXT | dict(guidance_scale=1.0), "no guidance"),
    PipelineCase("LTXImageToVideoPipeline", _ltx, TEXT | dict(image=picture(32, 32)), cut=True),
    PipelineCase("LTXConditionPipeline", _ltx, TEXT | dict(image=picture(32, 32)), cut=True),
    PipelineCase(
        "LTXI2VLongMultiPromptPipeline",
        lambda: _ltx() | dict(scheduler=LTXEulerAncestralRFScheduler()),
        TEXT
        | dict(guidance_scale=2.0, output_type="latent", skip_steps_sigma_threshold=None, cond_image=picture(32, 32)),
        cut=True,
    ),
    PipelineCase("LTX2Pipeline", _ltx2, TEXT | QUIET, cut=True),
    PipelineCase("LTX2Pipeline", _ltx2, TEXT | LOUD, "four kinds of guidance", cut=True),
    PipelineCase("LTX2ImageToVideoPipeline", _ltx2, TEXT | LOUD | dict(image=picture(32, 32), image_crf=0), cut=True),
    PipelineCase("LTX2ConditionPipeline", _ltx2, TEXT | LOUD, cut=True),
    PipelineCase("LTX2InContextPipeline", _ltx2, TEXT | LOUD, cut=True),
    PipelineCase("LTX2HDRPipeline", _ltx2, TEXT | dict(sigmas=[1.0, 0.5], output_type="pt")),
    PipelineCase(
        "LTX2DFRPipeline", lambda: _ltx2(use_keyframes_abs_pos_embedding=True), PAIRED | dict(sigmas=[1.0, 0.5])
    ),
)
