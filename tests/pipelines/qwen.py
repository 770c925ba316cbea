"""Qwen-Image."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler

from tests.zoo import qwen as zoo

from .autoencoders import qwen_vae
from .case import PipelineCase, dit
from .encoders import qwen25_vl, tokenizer

TEXT = dict(prompt="a red cat", negative_prompt="blue", height=32, width=32, max_sequence_length=16, true_cfg_scale=2.0)


def _qwen(**changes: Any) -> dict[str, Any]:
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=qwen_vae(),
        text_encoder=qwen25_vl(),
        tokenizer=tokenizer(),
        transformer=dit("QwenImageTransformer2DModel", zoo.QWEN, joint_attention_dim=32, **changes),
    )


CASES = (
    PipelineCase("QwenImagePipeline", _qwen, TEXT),
    PipelineCase("QwenImagePipeline", _qwen, TEXT | dict(true_cfg_scale=1.0), "no guidance"),
)
