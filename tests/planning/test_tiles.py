"""Tiles are counted as a VAE's own tiling makes them."""

import pytest
import torch

from dit_pipelining.planning.presets import preset
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.tiles import latents_of, tells_tiles, tile_sizes
from dit_pipelining.sharding.deferred import Recorder, without_deferred
from dit_pipelining.sharding.tile_jobs import run_steps
from tests import vaes

SMALL = (
    "AutoencoderKL",
    "AutoencoderKLWan",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLCogVideoX",
    "AutoencoderKLLTXVideo",
)


@pytest.mark.parametrize("name", SMALL)
def test_tiles_are_those_of_a_real_decode(name: str) -> None:
    vae = vaes.make(name)
    vae.enable_tiling()
    real: list[tuple[int, ...]] = []

    def compute(jobs: list) -> None:
        real.append(tuple(job.cost for job in jobs))
        for job in jobs:
            job.give(run_steps(job.steps, [*job.wanted(), *job.kept()], recorder.parts), here=True)

    recorder = Recorder(vae, compute)
    latents = vaes.latents_of(name)
    with torch.no_grad(), recorder.active():
        without_deferred(vae.decode(latents))
    counted = tile_sizes(vaes.make(name).to("meta"), tuple(latents.shape))
    assert len(counted) == len(real)
    assert counted[0] == real[0]
    assert max(map(len, counted)) == max(map(len, real)) > 1


def test_published_models_have_the_latents_and_tiles_that_are_known() -> None:
    flux = preset("flux.1-dev").vae
    assert tells_tiles(flux)
    assert not tells_tiles(preset("dit-xl-2-256").vae)
    vae = vaes.make("AutoencoderKL")
    assert latents_of(vae, flux, Size(1024, 768, 1)) == (1, 16, 128, 96)
    wan = preset("wan2.2-t2v-a14b").vae
    assert latents_of(vaes.make("AutoencoderKLWan"), wan, Size(720, 1280, 81)) == (1, 16, 21, 90, 160)
