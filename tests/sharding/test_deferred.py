"""A VAE whose tiles are noted down, packed, computed apart and handed back gives what it gives by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dit_pipelining.comm.packing import pack, tensor_in, unpack
from dit_pipelining.errors import SplitError
from dit_pipelining.sharding.deferred import Recorder, without_deferred
from dit_pipelining.sharding.tile_jobs import Job, run_steps
from tests import vaes
from tests.same import assert_same


def elsewhere(vae: Any, seen: list[int]) -> Recorder:
    """Computes all jobs but the last as another rank would: from a copy of what goes in, the last tile first."""

    def run(jobs: list[Job]) -> None:
        seen.append(len(jobs))
        for job in reversed(jobs[:-1]):
            packed, flats = pack((job.steps, job.wanted()))
            task = unpack(packed, tensor_in([flat.clone() for flat in flats]))
            job.give(run_steps(*task, recorder.parts), here=False)
        last = jobs[-1]
        last.give(run_steps(last.steps, [*last.wanted(), *last.kept()], recorder.parts), here=True)

    recorder = Recorder(vae, run)
    return recorder


def recorded(vae: Any, call: Callable[[], Any]) -> tuple[Any, list[int]]:
    seen: list[int] = []
    recorder = elsewhere(vae, seen)
    with torch.no_grad(), recorder.active():
        return without_deferred(call()), seen


def calls_of(vae: Any, name: str, batch: int) -> list[Callable[[], torch.Tensor]]:
    latents, pixels = vaes.latents_of(name)[:batch], vaes.pixels_of(name)[:batch]
    return [lambda: vaes.decoded(vae, latents), lambda: vaes.encoded(vae, pixels)]


@pytest.mark.parametrize("name", vaes.VAES)
def test_tiles_computed_apart_are_blended_to_what_the_vae_gives_itself(name: str) -> None:
    vae = vaes.make(name)
    vae.enable_tiling()
    vae.enable_slicing()
    for call in calls_of(vae, name, batch=2):
        with torch.no_grad():
            expected = call()
        found, seen = recorded(vae, call)
        assert_same(found, expected)
        assert min(seen) > 1  # every time several tiles at once
    assert all(isinstance(part, torch.nn.Module) for part in vae._modules.values() if part is not None)


@pytest.mark.parametrize("name", vaes.VAES)
def test_without_tiling_there_is_one_job(name: str) -> None:
    vae = vaes.make(name)
    vae.use_framewise_encoding = vae.use_framewise_decoding = False  # HunyuanVideo's tiles in time
    for call in calls_of(vae, name, batch=1):
        with torch.no_grad():
            expected = call()
        found, seen = recorded(vae, call)
        assert_same(found, expected)
        assert seen == [1]


def test_what_a_vae_returns_holds_no_deferred_tensor() -> None:
    vae = vaes.make("AutoencoderKL")
    image = vaes.pixels_of("AutoencoderKL")[:, :, :16, :16]
    with torch.no_grad():
        expected = vae.encode(image).latent_dist
    found, _ = recorded(vae, lambda: vae.encode(image).latent_dist)
    assert_same({**vars(found)}, {**vars(expected)})


class Odd(torch.nn.Module):
    """Does with tiles what no VAE of diffusers does."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Summing()

    def overwrites(self, latent: torch.Tensor) -> Any:
        decoded = self.decoder(latent, [0.0])
        latent.mul_(2)
        return decoded * 2

    def returns_to_a_tile(self, latent: torch.Tensor) -> Any:
        first, second = [0.0], [0.0]
        rows = [self.decoder(latent, first), self.decoder(latent, second)]
        assert rows[0].shape == latent.shape
        return [*rows, self.decoder(latent, second), self.decoder(latent, first)]

    def computes(self, latent: torch.Tensor) -> Any:
        one, other = self.decoder(latent, [0.0]), self.decoder(latent + 1, [1.0])
        one[0] = other[1] / 2 - 1
        return torch.cat([one, other]), 1 + one, one - other, -one, len(one), torch.stack([one, other]).sum()


class Summing(torch.nn.Module):
    def forward(self, latent: torch.Tensor, state: list[float]) -> torch.Tensor:
        state[0] += 1
        return latent * state[0]


def test_a_tile_that_is_written_to_before_it_is_computed_is_an_error() -> None:
    vae = Odd()
    with pytest.raises(SplitError, match="written to the input"):
        recorded(vae, lambda: vae.overwrites(torch.ones(3)))


def test_state_of_the_last_tile_stays_and_that_of_another_is_missed() -> None:
    vae = Odd()
    with pytest.raises(SplitError, match="goes back to a tile"):
        recorded(vae, lambda: vae.returns_to_a_tile(torch.ones(3)))


def test_other_operations_get_the_computed_tiles() -> None:
    vae = Odd()
    expected = vae.computes(torch.arange(3.0))
    found, seen = recorded(vae, lambda: vae.computes(torch.arange(3.0)))
    assert_same(found, expected)
    assert seen == [2]
