"""A VAE that takes a clip in chunks gives what diffusers' whole-clip encode and decode give, bit for bit."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan

from dit_pipelining.errors import InputError
from dit_pipelining.stream import vae_speed
from dit_pipelining.stream.vae import StreamVAE


def vae(residual: bool) -> AutoencoderKLWan:
    torch.manual_seed(0)
    more: dict[str, Any] = dict(patch_size=2, in_channels=12, out_channels=12, is_residual=True) if residual else {}
    made = AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, True], **more
    )
    return made.eval()


def clip(latent_frames: int, seed: int = 1) -> torch.Tensor:
    shape = (1, 3, 1 + 4 * (latent_frames - 1), 64, 64)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.mark.parametrize("residual", [False, True], ids=["Wan 2.1", "Wan 2.2"])
@pytest.mark.parametrize("chunks", [(1, 1, 1, 1), (2, 1, 1), (3, 1)])
def test_chunks_give_the_bits_of_the_whole_clip(residual: bool, chunks: tuple[int, ...]) -> None:
    own, video = vae(residual), clip(sum(chunks))
    stream = StreamVAE(own)
    with torch.no_grad():
        latents = own.encode(video).latent_dist.mode()
        frames = own.decode(latents).sample
    encoded, decoded, at = [], [], 0
    for count in chunks:
        taken = stream.frames_of(count)
        encoded.append(stream.encode_chunk(video[:, :, at : at + taken]))
        decoded.append(stream.decode_chunk(encoded[-1]))
        at += taken
    assert torch.equal(torch.cat(encoded, dim=2), latents)
    assert torch.equal(torch.cat(decoded, dim=2), frames)


def test_streams_of_one_vae_do_not_mix_and_a_reset_begins_anew() -> None:
    own = vae(residual=False)
    videos = [clip(2, seed) for seed in (1, 2)]
    expected = [own.decode(own.encode(video).latent_dist.mode()).sample.detach() for video in videos]
    streams = [StreamVAE(own) for _ in videos]
    for _ in range(2):
        latents = [[stream.encode_chunk(video[:, :, :1])] for stream, video in zip(streams, videos, strict=True)]
        for stream, video, known in zip(streams, videos, latents, strict=True):
            known.append(stream.encode_chunk(video[:, :, 1:]))
        for number in range(2):
            first, second = (streams[number].decode_chunk(part) for part in latents[number])
            assert torch.equal(torch.cat([first, second], dim=2), expected[number])
            streams[number].reset()


def test_frames_that_are_no_whole_latents_are_refused() -> None:
    stream = StreamVAE(vae(residual=False))
    with pytest.raises(InputError, match="3 frames came; the VAE takes 1 \\+ 4k"):
        stream.encode_chunk(clip(2)[:, :, :3])
    stream.encode_chunk(clip(2)[:, :, :1])
    with pytest.raises(InputError, match="takes 4k frames here"):
        stream.encode_chunk(clip(2)[:, :, :1])


@pytest.mark.parametrize("residual", [False, True], ids=["Wan 2.1", "Wan 2.2"])
def test_a_vae_that_was_sped_up_differs_by_rounding_only(residual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own, fast = vae(residual).double(), vae(residual).double()
    monkeypatch.setattr(vae_speed, "_compiled", lambda: vae_speed.normalise)  # without a compiler
    vae_speed.speed_up(fast)
    video = clip(2).double()
    with torch.no_grad():
        latents, frames = own.encode(video).latent_dist.mode(), own.decode(own.encode(video).latent_dist.mode()).sample
        torch.testing.assert_close(fast.encode(video).latent_dist.mode(), latents, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fast.decode(latents).sample, frames, rtol=1e-4, atol=1e-4)


def test_a_tiling_vae_is_refused() -> None:
    own = vae(residual=False)
    own.enable_tiling()
    with pytest.raises(InputError, match="disable_tiling"):
        StreamVAE(own)
