"""Measure the VAE of a pipeline: one encode and one decode, with random weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dit_pipelining.planning.models import ModelSpec, read_json
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.stopwatch import median_seconds
from dit_pipelining.weights.empty import empty_model
from dit_pipelining.weights.pipelines import diffusers_class
from dit_pipelining.weights.random import fill_randomly

MOST_CALLS = 5


def build_vae(model: ModelSpec, dtype: torch.dtype) -> nn.Module | None:
    """The VAE of a preset or of a pipeline's folder, without weights; None where there is none."""
    found = _class_and_config(model)
    if found is None:
        return None
    name, config = found
    return empty_model(diffusers_class(name), config, dtype)


def measure_vae(vae: Any, size: Size, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Seconds of encoding and of decoding one request, without tiling.

    Args:
        vae: without weights; it has random ones afterwards.
        size: of what is generated.
        dtype: of the VAE.
        device: that is measured.
    """
    fill_randomly(vae, [name for name, _ in vae.named_children()], device)
    shape = (1, 3, size.frames, size.height, size.width)
    over_time = any(parameter.ndim == 5 for parameter in vae.parameters())  # kernels of three-dimensional convolutions
    pixels = torch.randn(shape if over_time else (1, 3, size.height, size.width), device=device).to(dtype)
    latents = None

    def encode() -> None:
        nonlocal latents
        encoded = vae.encode(pixels, return_dict=False)[0]
        latents = encoded if isinstance(encoded, torch.Tensor) else encoded.mode()

    with torch.no_grad():
        encoding = median_seconds(encode, device, MOST_CALLS)
        decoding = median_seconds(lambda: vae.decode(latents, return_dict=False), device, MOST_CALLS)
    frames = 1 if over_time else size.frames  # a VAE for images decodes a video frame by frame
    return encoding * frames, decoding * frames


def _class_and_config(model: ModelSpec) -> tuple[str, Mapping[str, Any]] | None:
    known = model.transformers[0].known
    if model.source == "preset" and known is not None:
        return known.vae["class"], known.vae["config"]
    file = model.folder / "vae" / "config.json" if model.folder is not None else None
    if file is None or not file.is_file():
        return None
    config = read_json(file)
    return config["_class_name"], {key: value for key, value in config.items() if not key.startswith("_")}
