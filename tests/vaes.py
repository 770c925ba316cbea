"""Tiny VAEs with random weights, one of each class whose tiling can be spread, and sizes at which they have several tiles."""

from dataclasses import dataclass
from typing import Any

import diffusers
import torch

SIXTEEN = dict(
    tile_sample_min_height=16, tile_sample_min_width=16, tile_sample_stride_height=8, tile_sample_stride_width=8
)


@dataclass(frozen=True)
class TinyVae:
    """How to make one, its tiling, and the shapes of a latent and of pixels that take several tiles."""

    config: dict[str, Any]
    tiling: dict[str, Any]
    latents: tuple[int, ...]
    pixels: tuple[int, ...]


def make(name: str, *, noise: bool = False) -> Any:
    """The VAE of a diffusers class, with small tiles; with `noise`, LTX-Video's adds some while it decodes."""
    torch.manual_seed(0)
    config = VAES[name].config | (dict(decoder_inject_noise=(True,) * 5) if noise else {})
    vae = getattr(diffusers, name)(**config).eval()
    for parameter in vae.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    for key, parameter in vae.named_parameters():
        if "per_channel_scale" in key:  # of the noise
            torch.nn.init.ones_(parameter)
    use_small_tiles(vae, name)
    return vae


def use_small_tiles(vae: Any, name: str) -> None:
    for attribute, value in VAES[name].tiling.items():
        assert hasattr(vae, attribute), attribute
        setattr(vae, attribute, value)


def latents_of(name: str) -> torch.Tensor:
    return torch.randn(VAES[name].latents, generator=torch.Generator().manual_seed(1))


def pixels_of(name: str) -> torch.Tensor:
    return torch.rand(VAES[name].pixels, generator=torch.Generator().manual_seed(2)) * 2 - 1


def decoded(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    arguments = (torch.tensor([0.05]),) if vae.config.get("timestep_conditioning") else ()
    sample: torch.Tensor = vae.decode(latents, *arguments).sample
    return sample


def encoded(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The parameters of the distribution that pixels are encoded to."""
    parameters: torch.Tensor = vae.encode(pixels).latent_dist.parameters
    return parameters


_wan = dict(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True])
_statistics = dict(latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
_ltx: dict[str, Any] = dict(
    latent_channels=8,
    block_out_channels=(8, 8, 8, 8),
    decoder_block_out_channels=(8, 8, 8, 8),
    layers_per_block=(1, 1, 1, 1, 1),
    decoder_layers_per_block=(1, 1, 1, 1, 1),
    spatio_temporal_scaling=(True, True, False, False),
    decoder_spatio_temporal_scaling=(True, True, False, False),
    decoder_inject_noise=(False,) * 5,
    upsample_residual=(False,) * 4,
    upsample_factor=(1,) * 4,
    patch_size=1,
    patch_size_t=1,
    encoder_causal=True,
    decoder_causal=False,
)
_image = dict(
    block_out_channels=(8, 8),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    layers_per_block=1,
    latent_channels=4,
    norm_num_groups=2,
)
_square = dict(tile_sample_min_size=16, tile_latent_min_size=8, tile_overlap_factor=0.25)

VAES: dict[str, TinyVae] = {
    "AutoencoderKL": TinyVae(_image, _square, (2, 4, 13, 21), (2, 3, 26, 42)),
    "AutoencoderKLFlux2": TinyVae(_image, _square, (2, 4, 13, 21), (2, 3, 26, 42)),
    "AutoencoderKLWan": TinyVae({**_wan, **_statistics}, SIXTEEN, (1, 4, 3, 5, 4), (1, 3, 9, 40, 32)),
    "AutoencoderKLQwenImage": TinyVae({**_wan, **_statistics}, SIXTEEN, (1, 4, 1, 5, 4), (1, 3, 1, 40, 32)),
    "AutoencoderKLHunyuanVideo": TinyVae(
        dict(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        ),
        {**SIXTEEN, "tile_sample_min_num_frames": 8, "tile_sample_stride_num_frames": 4},
        (1, 4, 4, 3, 5),
        (1, 3, 13, 24, 40),
    ),
    "AutoencoderKLCogVideoX": TinyVae(
        dict(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        dict(
            tile_sample_min_height=16,
            tile_sample_min_width=16,
            tile_latent_min_height=2,
            tile_latent_min_width=2,
            tile_overlap_factor_height=0.5,
            tile_overlap_factor_width=0.5,
        ),
        (1, 4, 4, 3, 4),
        (1, 3, 9, 24, 32),
    ),
    "AutoencoderKLLTX2Video": TinyVae(
        dict(
            latent_channels=4,
            block_out_channels=(8,),
            decoder_block_out_channels=(8,),
            layers_per_block=(1,),
            decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatial",),
            upsample_residual=(False,),
            upsample_type=("spatial",),
            upsample_factor=(1,),
            patch_size=1,
            patch_size_t=1,
            decoder_causal=False,
        ),
        SIXTEEN,
        (1, 4, 2, 12, 14),
        (1, 3, 2, 24, 28),
    ),
    "AutoencoderKLLTXVideo": TinyVae(_ltx, SIXTEEN, (1, 8, 2, 8, 10), (1, 3, 5, 32, 40)),
}
