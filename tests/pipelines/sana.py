"""Sana."""

from typing import Any

import numpy as np
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SanaControlNetModel,
    SCMScheduler,
)

from tests.zoo import sana as zoo
from tests.zoo.case import without

from .autoencoders import dc_ae, ltx2_vae, wan_vae
from .case import PipelineCase, dit, picture
from .embeds import embeds
from .encoders import connectors, decoder_only, gemma3, tokenizer

PLAIN = dict(use_resolution_binning=False, complex_human_instruction=None, height=32, width=32, max_sequence_length=16)
TEXT = dict(prompt="a red cat", negative_prompt="blue", **PLAIN)


def _sana(**changes: Any) -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=decoder_only("Gemma2", 8),
        vae=dc_ae(),
        transformer=dit("SanaTransformer2DModel", zoo.SANA, **changes),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def _sprint() -> dict[str, Any]:
    changes = dict(qk_norm="rms_norm_across_heads", guidance_embeds=True)
    return _sana(**changes) | dict(scheduler=SCMScheduler())


def _video() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=decoder_only("Gemma2", 8),
        vae=wan_vae(),
        transformer=dit("SanaVideoTransformer3DModel", zoo.VIDEO),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _world() -> dict[str, Any]:
    return dict(
        tokenizer=tokenizer(),
        text_encoder=decoder_only("Gemma2", 12),
        vae=ltx2_vae(),
        transformer=dit("SanaWMTransformer3DModel", zoo.WORLD, chunk_plucker_channels=12),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _refiner() -> dict[str, Any]:
    return dict(
        transformer=dit("SanaWMLTX2RefinerTransformer3DModel", zoo.REFINER, caption_channels=32),
        connectors=connectors(),
        tokenizer=tokenizer(),
        text_encoder=gemma3(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=ltx2_vae(),
        text_max_sequence_length=16,
    )


CASES = (
    PipelineCase("SanaPipeline", _sana, TEXT, cut=True),
    PipelineCase("SanaPAGPipeline", lambda: _sana() | dict(pag_applied_layers=["blocks.0"]), TEXT),
    PipelineCase(
        "SanaControlNetPipeline",
        lambda: _sana() | dict(controlnet=SanaControlNetModel(**zoo.SANA | dict(num_layers=2))),
        TEXT | dict(control_image=picture(32, 32)),
        cut=True,
    ),
    PipelineCase("SanaSprintPipeline", _sprint, without(TEXT, "negative_prompt")),
    PipelineCase("SanaSprintImg2ImgPipeline", _sprint, without(TEXT, "negative_prompt") | dict(image=picture(32, 32))),
    PipelineCase("SanaVideoPipeline", _video, TEXT | dict(frames=9), cut=True),
    PipelineCase("SanaImageToVideoPipeline", _video, TEXT | dict(frames=9, image=picture(32, 32)), cut=True),
    PipelineCase(
        "SanaWMPipeline",
        _world,
        dict(
            prompt="a red cat",
            negative_prompt="blue",
            image=picture(32, 32),
            c2w=lambda: np.eye(4, dtype=np.float32)[None].repeat(3, 0),
            intrinsics=[16.0, 16.0, 16.0, 16.0],
            height=32,
            width=32,
            num_frames=3,
            max_sequence_length=16,
        ),
    ),
    PipelineCase(
        "SanaWMLTX2Refiner",
        _refiner,
        dict(
            sana_latent=embeds(1, 4, 4, 2, 2),
            prompt="a red cat",
            fps=16.0,
            block_size=1,
            kv_max_frames=3,
            sigmas=(0.9, 0.4, 0.0),
            output_type="latent",
        ),
    ),
)
