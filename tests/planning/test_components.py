"""What is known about encoders and VAEs."""

import pytest
import torch

from dit_pipelining.capture.counting import WorkCounter
from dit_pipelining.costs.devices import find_device
from dit_pipelining.planning.beside import beside_preset
from dit_pipelining.planning.components import components_of
from dit_pipelining.planning.degrees import Degrees
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
    assert large.decode_seconds / small.decode_seconds == pytest.approx(161 / 81)
    assert large.decode_bytes / small.decode_bytes == pytest.approx(161 / 81)
    assert (large.encoder_bytes, large.vae_bytes) == (small.encoder_bytes, small.vae_bytes)
    assert small.encoder_bytes == 2 * known.text_encoders[0]["parameters"]
    single = components_of(beside_preset(known), Size(480, 832, 81), 4, H200, None)
    assert single.vae_bytes == 2 * small.vae_bytes
    assert single.decode_seconds > 2 * small.decode_seconds


def test_the_partitioner_gets_their_share_of_a_call():
    beside = components_of(beside_preset(preset("flux.1-dev")), Size(1024, 1024, 1), 2, H200, None)
    encoder, vae = beside.for_partitioner(50, Degrees(pipeline=2))
    assert (encoder.name, vae.name) == ("text_encoder", "vae")
    assert vae.seconds == beside.decode_seconds / 50
    assert vae.bytes == beside.vae_bytes + beside.decode_bytes
    none = components_of(beside_preset(preset("dit-xl-2-256")), Size(256, 256, 1), 2, H200, None)
    assert [component.name for component in none.for_partitioner(50, Degrees(pipeline=2))] == ["vae"]
