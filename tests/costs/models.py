"""Models of real width without weights, and inputs of real size without data."""

from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import FluxTransformer2DModel

from dit_pipelining.planning.inputs import build_inputs
from dit_pipelining.planning.presets import preset


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def flux() -> tuple[FluxTransformer2DModel, dict[str, Any]]:
    """FLUX.1-dev's blocks at 1024 x 1024 pixels."""
    with init_empty_weights(include_buffers=False):
        model = FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True).to(torch.bfloat16)
    return model, build_inputs(preset("flux.1-dev").inputs)
