"""Make a VAE faster on a GPU, at the cost of the last bits: for streams, which decode every chunk in time."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from torch import nn
from torch.nn import functional as F


def speed_up(vae: AutoencoderKLWan) -> None:
    """Lay out convolutions as the GPU's matrix units want them, and normalise in one kernel.

    diffusers' normalisation casts to float32 and back and takes seven kernels, which read and write nine times what one
    does; in a picture's full resolution that is a fifth of the decoder's time.
    """
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        elif isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        elif isinstance(module, WanRMS_norm) and module.channel_first:
            own: Any = module
            own.forward = functools.partial(_normalised, own)


def normalise(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root mean square normalisation over dimension 1, in float32.

    Args:
        states: (batch, channels, ...).
        weight: (channels, 1, ...), the square root of the number of channels included.
    """
    return (F.normalize(states.float(), dim=1) * weight).to(states.dtype)


@functools.cache
def _compiled() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    compiled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.compile(normalise, dynamic=True)
    return compiled


def _normalised(norm: Any, states: torch.Tensor) -> torch.Tensor:
    return _compiled()(states, norm.gamma * norm.scale) + norm.bias
