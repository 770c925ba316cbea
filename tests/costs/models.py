"""Models of real width without weights, and inputs of real size without data."""

from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import FluxTransformer2DModel


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def flux() -> tuple[FluxTransformer2DModel, dict[str, Any]]:
    """FLUX.1-dev's blocks at 1024 x 1024 pixels."""
    with init_empty_weights(include_buffers=False):
        model = FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True).to(torch.bfloat16)
    inputs = dict(
        hidden_states=empty(1, 4096, 64),
        encoder_hidden_states=empty(1, 512, 4096),
        pooled_projections=empty(1, 768),
        timestep=empty(1),
        guidance=empty(1),
        img_ids=empty(4096, 3),
        txt_ids=empty(512, 3),
    )
    return model, inputs
