"""What is known about encoders and VAEs."""

import pytest
import torch

from dit_pipelining.capture.counting import WorkCounter
from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.devices import find_device
from dit_pipelining.planning.beside import beside_preset
from dit_pipelining.planning.components import components_of
from dit_pipelining.planning.models import find_model
from dit_pipelining.planning.presets import preset, preset_names
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.vae_profile import build_vae

H200 = find_device("h200")


@pytest.mark.parametrize("name", preset_names())
def test_a_presets_vae_has_its_parameters(name):
    vae = build_vae(find_model(name), torch.bfloat16)
    assert sum(parameter.numel() for parameter in vae.parameters()) == preset(name).vae["parameters"]


@pytest.mark.parametrize("name", ["flux.1-dev", "dit-xl-2-256", "flux.2-dev", "sana-1600m"])
def test_what_a_decode_does_is_what_the_class_does(name):
    known = preset(name)
    vae = build_vae(find_model(name), torch.bfloat16).to("meta")
    side = known.defaults["height"] // known.vae["spatial"]
    channels = known.vae["latent_channels"]
    latents = torch.empty(1, channels, side, side, dtype=torch.bfloat16, device="meta")
    with torch.no_grad(), WorkCounter() as counter:
        counter.start()
        vae.decode(latents)
        work = counter.taken()
    assert work.flops == known.vae["decode"]["flops"]
    moved = sum(operation.bytes * times for operation, times in work.operations.items())
    assert moved == pytest.approx(known.vae["decode"]["bytes"], rel=0.01)


def test_seconds_and_bytes_grow_with_the_size():
    known = preset("wan2.1-t2v-1.3b")
    small = components_of(beside_preset(known), Size(480, 832, 81), 2, H200, None)
    large = components_of(beside_preset(known), Size(480, 832, 161), 2, H200, None)
    assert large.seconds["vae"] / small.seconds["vae"] == pytest.approx(161 / 81)
    assert large.decode_bytes / small.decode_bytes == pytest.approx(161 / 81)
    assert large.held == small.held
    assert small.held["text_encoder"] == 2 * known.text_encoders[0]["parameters"]
    single = components_of(beside_preset(known), Size(480, 832, 81), 4, H200, None)
    assert single.held["vae"] == 2 * small.held["vae"]
    assert single.seconds["vae"] > 2 * small.seconds["vae"]


def flux():
    return components_of(beside_preset(preset("flux.1-dev")), Size(1024, 1024, 1), 2, H200)


def test_the_partitioner_gets_their_share_of_a_call():
    beside, config = flux(), ParallelConfig(pipeline_parallel_size=2, cfg_parallel_size=2)
    first, last = beside.placed(config).for_partitioner(config, calls=50)
    assert (first.rank, last.rank) == (0, 1)
    assert last.seconds == beside.seconds["vae"] / 50
    assert last.bytes == beside.held["vae"] + beside.decode_bytes
    assert first.bytes == sum(beside.held.values()) - beside.held["vae"]


def test_components_on_every_rank_are_held_and_run_by_each():
    placed = flux().placed(
        ParallelConfig(pipeline_parallel_size=2, component_ranks={"vae": "all", "text_encoder_2": 1})
    )
    assert [own.vae > 0 < own.decode for own in placed.held] == [True, True]
    assert [call.ranks for call in (*placed.encodes, *placed.decodes)] == [(0,), (1,), None]


def test_ranks_that_share_tiles_hold_the_vae_and_decode_together():
    """Those before the last rank help it."""
    beside = flux()
    shared = beside.placed(ParallelConfig(pipeline_parallel_size=2, cfg_parallel_size=2, vae_patch_parallel_size=3))
    assert [own.vae // beside.held["vae"] for own in shared.held] == [0, 1, 1, 1]
    assert [call.ranks for call in shared.decodes] == [(3, 2, 1)]
