"""Seconds of a model's parts: by a data sheet, and measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel

from dit_pipelining.capture.capturing import capture
from dit_pipelining.capture.counting import Operation
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.costs.devices import H200, RTX_4090
from dit_pipelining.costs.measured import Measured, MeasuredProfile, read_profile
from dit_pipelining.costs.model_costs import model_costs
from dit_pipelining.costs.roofline import Roofline
from dit_pipelining.costs.timing import find_timing
from dit_pipelining.errors import ConfigError
from tests.costs import models

PROFILE = MeasuredProfile(
    model="flux",
    model_class="FluxTransformer2DModel",
    device="NVIDIA H200",
    dtype="bfloat16",
    blocks={"FluxTransformerBlock": Measured(4e-3), "FluxSingleTransformerBlock": Measured(2e-3)},
    prologue=Measured(1e-4),
    epilogue=Measured(2e-4),
    size=dict(height=1024, width=1024, frames=1, batch=1),
    vae_encode_seconds=0.1,
    vae_decode_seconds=0.2,
    versions={"torch": torch.__version__},
)


@pytest.fixture(scope="module")
def flux() -> tuple[BlockGraph, FluxTransformer2DModel]:
    model, inputs = models.flux()
    return capture(model, inputs, count_work=True), model


def test_an_operation_takes_the_longer_of_arithmetic_and_traffic() -> None:
    roofline = Roofline(replace(H200, matrix_share=0.5, memory_share=0.5))
    assert roofline.operation_seconds(Operation(flops=0, bytes=24 * 10**9, itemsize=2)) == pytest.approx(0.01)
    assert roofline.operation_seconds(Operation(flops=int(989.4e12), bytes=1, itemsize=2)) == pytest.approx(2.0)
    assert roofline.operation_seconds(Operation(flops=int(67e12), bytes=1, itemsize=4)) == pytest.approx(2.0)


def test_large_blocks_take_a_little_more_than_their_flops(flux: tuple[BlockGraph, FluxTransformer2DModel]) -> None:
    costs = model_costs(*flux, Roofline(H200))
    for block in costs.blocks:
        arithmetic = block.flops / (H200.bfloat16_flops_per_second * H200.matrix_share)
        assert arithmetic < block.seconds < 1.6 * arithmetic
    # The time projections are small products with large weights: reading those is what takes time.
    assert costs.prologue.seconds > 2 * costs.prologue.flops / (H200.bfloat16_flops_per_second * H200.matrix_share)


def test_a_slower_device_takes_longer(flux: tuple[BlockGraph, FluxTransformer2DModel]) -> None:
    fast, slow = (model_costs(*flux, Roofline(device)) for device in (H200, RTX_4090))
    assert all(3 < b.seconds / a.seconds < 7 for a, b in zip(fast.blocks, slow.blocks, strict=True))


def test_measured_seconds_go_to_blocks_by_kind(flux: tuple[BlockGraph, FluxTransformer2DModel]) -> None:
    costs = model_costs(*flux, PROFILE)
    assert [block.seconds for block in costs.blocks] == pytest.approx([4e-3, 4e-3, 2e-3, 2e-3])
    assert (costs.prologue.seconds, costs.epilogue.seconds) == (1e-4, 2e-4)


def test_measured_seconds_are_scaled_to_another_size(flux: tuple[BlockGraph, FluxTransformer2DModel]) -> None:
    half = {
        kind: Measured(part.seconds, flops)
        for (kind, part), flops in zip(
            PROFILE.blocks.items(), (block.flops // 2 for block in model_costs(*flux).blocks[1:3]), strict=True
        )
    }
    costs = model_costs(*flux, replace(PROFILE, blocks=half))
    assert [block.seconds for block in costs.blocks] == pytest.approx([8e-3, 8e-3, 4e-3, 4e-3], rel=1e-6)


def test_a_profile_of_another_model_is_refused(flux: tuple[BlockGraph, FluxTransformer2DModel]) -> None:
    with pytest.raises(ConfigError, match="no block of kind 'FluxTransformerBlock'; it has WanTransformerBlock"):
        model_costs(*flux, replace(PROFILE, blocks={"WanTransformerBlock": Measured(1e-3)}))


def test_a_vae_is_scaled_by_pixels() -> None:
    assert PROFILE.vae_seconds() == (0.1, 0.2)
    assert PROFILE.vae_seconds(pixels=512 * 512) == pytest.approx((0.025, 0.05))
    assert replace(PROFILE, vae_encode_seconds=None).vae_seconds() == (0.0, 0.2)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == PROFILE
    assert find_timing(tmp_path / "profile.json") == PROFILE
    assert find_timing("h200") == Roofline(H200)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "is no profile of format 1"),
        ({"blocks": {"Block": {"seconds": -1}}}, "-1 is no number of seconds"),
        ({"blocks": {"Block": {}}}, "KeyError: 'seconds'"),
        ({"vae_decode_seconds": "fast"}, "'fast' is no number of seconds"),
        ({"blocks": None}, "is not complete"),
    ],
)
def test_a_broken_profile_says_what_is_wrong(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


def test_what_is_neither_profile_nor_device_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*No such file"):
        find_timing(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match=r"neither a profile .* nor a device; known devices are h200"):
        find_timing("fast-gpu")
