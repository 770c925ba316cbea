"""StreamVAE: encodes and decodes a video chunk by chunk, with what its causal convolutions need of earlier chunks.

[Note: chunks of a causal VAE]
Wan's VAE takes the first frame alone and then four frames per latent, each with a cache of the last two inputs of every
causal convolution. diffusers keeps the caches on the model for the length of one clip; here they belong to a stream, so
that chunks of several streams can come in any order, and a clip need not end.

The 1x1x1 convolution around the latents runs once per clip there and once per chunk here. That gives the same bits for
pictures of 8x8 latents and more; smaller tensors take another path of torch on the CPU, which rounds by size.
"""

from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify, unpatchify

from dit_pipelining.errors import InputError
from dit_pipelining.runtime.owned import on_this_rank
from dit_pipelining.stream.spec import FRAMES_PER_LATENT


class StreamVAE:
    """The VAE of one stream.

    Args:
        vae: an AutoencoderKLWan; it is shared by all streams, and not changed.

    Raises:
        InputError: the VAE is of another class, or cuts pictures into tiles, whose caches would be one set per tile.
    """

    def __init__(self, vae: Any) -> None:
        if not isinstance(vae, AutoencoderKLWan):
            raise InputError(
                f"{type(vae).__name__} cannot stream yet: only AutoencoderKLWan encodes and decodes in chunks."
            )
        if vae.use_tiling:
            raise InputError("the VAE cuts pictures into tiles; call vae.disable_tiling() before it streams.")
        self.vae = vae
        self.reset()

    def reset(self) -> None:
        """Begin a new video."""
        counts = (self.vae.encoder, self.vae.decoder)
        self._encoder_cache, self._decoder_cache = ([None] * _causal_convolutions(part) for part in counts)
        self._encoded = self._decoded = 0

    def frames_of(self, latents: int) -> int:
        """How many frames the next `latents` latent frames of the video to encode take."""
        return FRAMES_PER_LATENT * latents - (FRAMES_PER_LATENT - 1 if self._encoded == 0 else 0)

    @torch.no_grad()
    def encode_chunk(self, frames: torch.Tensor) -> torch.Tensor:
        """Encode the next frames.

        Args:
            frames: (batch, channels, frames, height, width) in [-1, 1]; 1 + 4k of them at the beginning, later 4k.

        Returns:
            the latents' mean, (batch, channels, latent frames, height, width), as `vae.encode` gives it for the clip.

        Raises:
            InputError: the frames are no whole number of latents.
        """
        own = self.vae
        count = frames.shape[2]
        alone = 1 if self._encoded == 0 else 0
        if count < 1 or (count - alone) % FRAMES_PER_LATENT:
            expected = "1 + 4k" if alone else "4k"
            raise InputError(f"a chunk of {count} frames came; the VAE takes {expected} frames here.")
        if own.config.patch_size is not None:
            frames = patchify(frames, patch_size=own.config.patch_size)
        sizes = [1] * alone + [FRAMES_PER_LATENT] * ((count - alone) // FRAMES_PER_LATENT)
        with on_this_rank([own]):
            encoded = [
                own.encoder(part, feat_cache=self._encoder_cache, feat_idx=[0]) for part in frames.split(sizes, dim=2)
            ]
            self._encoded += len(sizes)
            mean: torch.Tensor = own.quant_conv(torch.cat(encoded, dim=2)).chunk(2, dim=1)[0]
        return mean

    @torch.no_grad()
    def decode_chunk(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode the next latents.

        Args:
            latents: (batch, channels, latent frames, height, width), as `vae.decode` takes them.

        Returns:
            (batch, channels, frames, height, width) in [-1, 1]; four frames per latent, one for the first of the video.
        """
        own = self.vae
        decoded = []
        with on_this_rank([own]):
            for part in own.post_quant_conv(latents).split(1, dim=2):
                first = {"first_chunk": True} if self._decoded == 0 else {}
                decoded.append(own.decoder(part, feat_cache=self._decoder_cache, feat_idx=[0], **first))
                self._decoded += 1
        frames = torch.cat(decoded, dim=2)
        if own.config.patch_size is not None:
            frames = unpatchify(frames, patch_size=own.config.patch_size)
        return torch.clamp(frames, min=-1.0, max=1.0)

    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the transformer takes them, by the VAE's statistics."""
        mean, inverse = self._statistics(latents)
        return (latents - mean) * inverse

    def denormalise(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the VAE takes them, in its dtype; as WanPipeline computes them."""
        mean, inverse = self._statistics(latents)
        return (latents / inverse + mean).to(self.vae.dtype)

    def _statistics(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config: Any = self.vae.config
        mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1).to(like.device, like.dtype)
        inverse = 1.0 / torch.tensor(config.latents_std).view(1, -1, 1, 1, 1).to(like.device, like.dtype)
        return mean, inverse


def _causal_convolutions(part: torch.nn.Module) -> int:
    """Entries of a cache: one per causal convolution, as AutoencoderKLWan counts them."""
    return sum(isinstance(module, WanCausalConv3d) for module in part.modules())
