"""Diffusers pipelines with random weights of real configurations, and the calls that benchmarks make of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, WanPipeline
from random_models import random_transformer

from dit_pipelining.planning.presets import preset


@dataclass(frozen=True)
class Workload:
    """A model, a size and a number of steps.

    Attributes:
        preset: whose configuration it has.
        size: pixels and frames, as arguments of the pipeline.
        steps: of each request.
        changes: of the configuration. Fewer blocks save time where the blocks are alike.
        guidances: whether it is run without guidance, with guidance (two calls a step), or both.
    """

    preset: str
    size: dict[str, int]
    steps: int
    changes: Mapping[str, int] = field(default_factory=dict)
    guidances: tuple[bool, ...] = (False, True)


def dtype_on(device: torch.device) -> torch.dtype:
    """What models are run in: float32 where nothing is fast."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def build(workload: Workload, device: torch.device, vae: Any = None) -> Any:
    """The pipeline with random weights, the same on every rank."""
    facts = preset(workload.preset)
    model = random_transformer(facts, device, workload.changes, dtype_on(device))
    missing: Any = None
    if facts.pipeline == "FluxPipeline":
        pipeline = FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, *[missing] * 4, transformer=model)
    else:
        pipeline = WanPipeline(missing, missing, vae, FlowMatchEulerDiscreteScheduler(shift=3.0), transformer=model)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def request(workload: Workload, device: torch.device, seed: int, guided: bool, batch: int = 1) -> dict[str, Any]:
    """Arguments of one call of the pipeline, which returns latents."""
    random = torch.Generator().manual_seed(seed)

    def embeds(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=random).to(device, dtype_on(device))

    call = dict(
        **workload.size,
        num_inference_steps=workload.steps,
        output_type="latent",
        return_dict=False,
        generator=[torch.Generator().manual_seed(seed + i) for i in range(batch)],
    )
    if workload.preset.startswith("flux"):
        return dict(**call, prompt_embeds=embeds(512, 4096), pooled_prompt_embeds=embeds(768))
    scale = 5.0 if guided else 1.0
    negative = embeds(512, 4096) if guided else None
    return dict(**call, prompt_embeds=embeds(512, 4096), negative_prompt_embeds=negative, guidance_scale=scale)
