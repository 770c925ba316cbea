"""Tiny autoencoders."""

from typing import Any

import diffusers

from tests.vaes import VAES


def image_vae(channels: int = 4, blocks: int = 1, **options: Any) -> diffusers.AutoencoderKL:
    """The VAE of Stable Diffusion and FLUX; `blocks` - 1 halvings of the picture."""
    return diffusers.AutoencoderKL(
        **{
            "sample_size": 32,
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownEncoderBlock2D",) * blocks,
            "up_block_types": ("UpDecoderBlock2D",) * blocks,
            "block_out_channels": (4,) * blocks,
            "layers_per_block": 1,
            "latent_channels": channels,
            "norm_num_groups": 1,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            "shift_factor": 0.0609,
            "scaling_factor": 1.5035,
            **options,
        }
    )


def wan_vae(channels: int = 4, **options: Any) -> diffusers.AutoencoderKLWan:
    """Wan's video VAE: 8 times smaller in space, 4 times in time."""
    return diffusers.AutoencoderKLWan(
        **{
            "base_dim": 4,
            "z_dim": channels,
            "dim_mult": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "latents_mean": [0.1] * channels,
            "latents_std": [1.5] * channels,
            **options,
        }
    )


def qwen_vae(channels: int = 4) -> diffusers.AutoencoderKLQwenImage:
    """Qwen-Image's VAE, a sibling of Wan's for one frame."""
    return diffusers.AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1] * channels,
        latents_std=[1.5] * channels,
    )


def hunyuan_video_vae(channels: int = 4) -> diffusers.AutoencoderKLHunyuanVideo:
    """HunyuanVideo's VAE: 8 times smaller in space, 4 times in time."""
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=channels, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=1
    )


def cogvideo_vae(channels: int = 4) -> diffusers.AutoencoderKLCogVideoX:
    """CogVideoX's VAE: 8 times smaller in space, 4 times in time."""
    return diffusers.AutoencoderKLCogVideoX(
        latent_channels=channels,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=1,
        sample_height=16,
        sample_width=16,
    )


def ltx_vae(channels: int = 4) -> diffusers.AutoencoderKLLTXVideo:
    """LTX's VAE."""
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
        patch_size_t=1,
    )


def ltx2_vae(channels: int = 4) -> diffusers.AutoencoderKLLTX2Video:
    """LTX-2's video VAE."""
    config = VAES["AutoencoderKLLTX2Video"].config | dict(latent_channels=channels)
    return diffusers.AutoencoderKLLTX2Video(**config)


def mochi_vae(channels: int = 4) -> diffusers.AutoencoderKLMochi:
    """Mochi's VAE."""
    return diffusers.AutoencoderKLMochi(
        latent_channels=channels,
        out_channels=3,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        latents_mean=(0.1,) * channels,
        latents_std=(1.5,) * channels,
    )


def dc_ae(channels: int = 4) -> diffusers.AutoencoderDC:
    """Sana's deep compression autoencoder."""
    return diffusers.AutoencoderDC(
        latent_channels=channels,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )


def allegro_vae(channels: int = 4) -> diffusers.AutoencoderKLAllegro:
    """Allegro's VAE: 8 times smaller in space, 4 times in time."""
    vae = diffusers.AutoencoderKLAllegro(
        sample_size=16,
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    vae.enable_tiling()  # it decodes no other way
    return vae


def flux2_vae(channels: int = 1) -> diffusers.AutoencoderKLFlux2:
    """FLUX.2's VAE; its latents are patches of 2 x 2, with 4 times the channels."""
    return diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def magvit_vae(channels: int = 4) -> diffusers.AutoencoderKLMagvit:
    """EasyAnimate's VAE: 8 times smaller in space, 4 times in time."""
    return diffusers.AutoencoderKLMagvit(
        latent_channels=channels, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
    )


def cosmos_vae(channels: int = 4) -> diffusers.AutoencoderKLCosmos:
    """Cosmos 1's tokenizer."""
    return diffusers.AutoencoderKLCosmos(
        latent_channels=channels,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=2,
        patch_size=4,
        latents_mean=[0.1] * 20 * channels,
        latents_std=[1.5] * 20 * channels,
    )


def oobleck(channels: int = 3) -> diffusers.AutoencoderOobleck:
    """Stable Audio's VAE."""
    return diffusers.AutoencoderOobleck(
        encoder_hidden_size=6,
        downsampling_ratios=[1, 2],
        decoder_channels=3,
        decoder_input_channels=channels,
        audio_channels=2,
        channel_multiples=[2, 4],
        sampling_rate=4,
    )
