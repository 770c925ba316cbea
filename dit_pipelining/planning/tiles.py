"""The tiles of a VAE at a size, without weights: its own tiling is run until it needs the first of them."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dit_pipelining.planning.recipes import Size
from dit_pipelining.sharding.deferred import Recorder
from dit_pipelining.sharding.tile_jobs import Job
from dit_pipelining.sharding.tile_ranks import can_spread


class _SeenError(Exception):
    """Ends a decode whose tiles are known."""


def tells_tiles(facts: Mapping[str, Any]) -> bool:
    """Whether a preset says how large tiles are: AutoencoderKL's are made of its sample_size, which has no real default."""
    return facts["class"] != "AutoencoderKL" or "sample_size" in facts["config"]


def latents_of(vae: nn.Module, facts: Mapping[str, Any], size: Size) -> tuple[int, ...]:
    """The shape of what a VAE decodes.

    Args:
        vae: with weights or without.
        facts: `latent_channels`, `spatial` and `temporal` of a preset's VAE.
        size: of what is generated.
    """
    height, width = size.height // facts["spatial"], size.width // facts["spatial"]
    if not any(parameter.ndim == 5 for parameter in vae.parameters()):  # kernels of two-dimensional convolutions
        return (1, facts["latent_channels"], height, width)
    frames = (size.frames - 1) // facts["temporal"] + 1
    return (1, facts["latent_channels"], frames, height, width)


def tile_sizes(vae: Any, latents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The numbers of elements of a decode's tiles.

    Tiles in time come one after the other: each is cut into tiles like the first, of which no more is run.

    Args:
        vae: on the meta device, without weights.
        latents: the shape that is decoded.

    Returns:
        of the tiles that are computed side by side, for each time that happens; nothing where tiles are not independent.
    """
    if not can_spread(type(vae)):
        return ()
    seen: list[Job] = []

    def see(jobs: list[Job]) -> None:
        seen.extend(jobs)
        raise _SeenError

    vae.enable_tiling()
    try:
        with torch.no_grad(), Recorder(vae, see).active():
            vae.decode(torch.empty(latents, device="meta", dtype=vae.dtype))
    except _SeenError:
        pass
    sizes = tuple(job.cost for job in seen)
    times = max(1, math.ceil(latents[2] / _frames_apart(vae, latents))) if len(latents) == 5 else 1
    return (sizes,) * times if sizes else ()


def _frames_apart(vae: Any, latents: tuple[int, ...]) -> int:
    """How many latent frames after the other tiles in time begin; all of them where time is not cut."""
    own = vars(vae)
    stride, longest = own.get("tile_sample_stride_num_frames"), own.get("tile_sample_min_num_frames")
    by_frames, compression = own.get("use_framewise_decoding", True), own.get("temporal_compression_ratio")
    if not stride or not by_frames or not compression or not longest or latents[2] <= longest // compression:
        return latents[2]
    return int(stride // compression)
