"""Descriptions of ranks, and the numbers that partitioners get for them."""

from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel

from dit_pipelining.capture.capturing import capture
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.costs.devices import GIB, PCIE_4, RTX_3090, RTX_4090
from dit_pipelining.costs.machine import Machine, Rank, machine
from dit_pipelining.costs.measured import Measured, MeasuredProfile
from dit_pipelining.costs.plan import plan_cut
from dit_pipelining.costs.roofline import Roofline
from dit_pipelining.errors import ConfigError
from partitioners import Component, DoesNotFitError, RankSpec


@pytest.fixture(scope="module")
def wan() -> tuple[BlockGraph, WanTransformer3DModel]:
    """Ten blocks of Wan 1.3B at 480p x 81 frames."""
    with init_empty_weights(include_buffers=False):
        model = WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=10).to(torch.bfloat16)
    inputs = dict(
        hidden_states=torch.empty(1, 16, 21, 60, 104, dtype=torch.bfloat16, device="meta"),
        timestep=torch.empty(1, dtype=torch.int64, device="meta"),
        encoder_hidden_states=torch.empty(1, 512, 4096, dtype=torch.bfloat16, device="meta"),
    )
    return capture(model, inputs, count_work=True), model


def test_devices_memory_and_speeds_are_read() -> None:
    assert machine(3, "rtx4090, RTX 3090:16GB*0.5, 24gb*2").ranks == (
        Rank(RTX_4090, 23 * GIB),
        Rank(RTX_3090, 15 * GIB, 0.5),
        Rank(None, 23 * GIB, 2.0),
    )


def test_one_description_stands_for_all_ranks() -> None:
    assert machine(3, "16GB").ranks == (Rank(None, 15 * GIB),) * 3
    assert machine(2).ranks == (Rank(),) * 2


def test_specs_are_taken_as_they_are() -> None:
    assert machine(2, [RankSpec(2.0), "rtx4090"]).ranks == (Rank(spec=RankSpec(2.0)), Rank(RTX_4090, 23 * GIB))


def test_seconds_come_from_the_first_device_unless_a_profile_is_given() -> None:
    assert machine(2, "24GB,rtx3090").timing == Roofline(RTX_3090)
    assert machine(2, "rtx3090", profile="rtx4090").timing == Roofline(RTX_4090)
    assert machine(2, "24GB,16GB").timing is None


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("rtx4090,rtx3090", "describes 2 ranks for 3 stages"),
        ("rtx4090,rtx3090,gtx1080", "no device 'gtx1080'; known are"),
        ("24,16,16", "no device '24'"),
        ("rtx4090:much", "has the memory 'much'; expected a device"),
        ("24GB*fast", r"the rank '24GB\*fast' has the speed 'fast'"),
        ("24GB*0", "has the speed '0'"),
        ("1GB", "too little memory: 1 GB are left to CUDA"),
        ("", "the rank '' is nothing known"),
        ([24], "the rank 24 is nothing known"),
        (24, "expected descriptions of ranks"),
    ],
)
def test_what_is_no_rank_is_an_error_that_shows_how_one_is_written(ranks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        machine(3, ranks)


def test_a_topology_that_a_device_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="GeForce RTX 4090 has no nvlink"):
        machine(2, "rtx4090", topology="nvlink")


def test_a_profile_of_an_unknown_device_cannot_be_compared_with_devices() -> None:
    profile = MeasuredProfile("wan", "Wan", "GeForce 256", "bfloat16", {}, Measured(0.0), Measured(0.0))
    with pytest.raises(ConfigError, match="no device 'GeForce 256'"):
        machine(2, "rtx4090", profile=profile)
    assert machine(2, "24GB,16GB", profile=profile).timing == profile


def test_a_faster_device_gets_more_blocks(wan: tuple[BlockGraph, WanTransformer3DModel]) -> None:
    cut = plan_cut(*wan, machine(2, "rtx4090,rtx3090"), "balanced")
    assert cut.partition.counts == (7, 3)
    first, second = cut.ranks
    assert (first.speed, first.memory_bytes) == (1.0, 23 * GIB)
    assert 0.4 < second.speed < 0.6  # 71 of 165.2 TFLOPS, but nearly the same memory bandwidth
    assert first.link_bytes_per_second == PCIE_4.usable_bytes_per_second


def test_a_speed_multiplies_that_of_the_device(wan: tuple[BlockGraph, WanTransformer3DModel]) -> None:
    ranks = plan_cut(*wan, machine(2, "rtx4090,rtx4090*0.5"), "balanced").ranks
    assert [rank.speed for rank in ranks] == [1.0, 0.5]


def test_only_vae_aware_counts_the_seconds_of_components(wan: tuple[BlockGraph, WanTransformer3DModel]) -> None:
    equal = Machine((Rank(),) * 2, Roofline(RTX_4090))
    total = sum(block.seconds for block in plan_cut(*wan, equal, "balanced").costs.blocks)
    vae = Component("vae", seconds=total / 2, preferred_rank=-1)
    assert plan_cut(*wan, equal, "balanced", components=[vae]).partition.counts == (5, 5)
    aware = plan_cut(*wan, equal, "vae-aware", components=[vae])
    assert sorted(aware.partition.counts) == [2, 8] or sorted(aware.partition.counts) == [3, 7]
    assert aware.partition.counts[1] < 5
    # Either way the plan says how busy the ranks are with it.
    for cut in (aware, plan_cut(*wan, equal, "uniform", components=[vae])):
        assert cut.owners == {"vae": 1}
        assert cut.ranks[1].fixed_seconds == pytest.approx(total / 2)


def test_sharded_weights_fit_where_whole_ones_do_not(wan: tuple[BlockGraph, WanTransformer3DModel]) -> None:
    whole = plan_cut(*wan, machine(1), "balanced").costs
    weights = sum(block.parameter_bytes for block in whole.blocks)
    [needed] = plan_cut(*wan, machine(1), "balanced").partition.stage_bytes(whole, [RankSpec()])
    short = Machine((Rank(memory_bytes=needed - weights // 4),), Roofline(RTX_4090))
    with pytest.raises(DoesNotFitError):
        plan_cut(*wan, short, "balanced")
    sharded = plan_cut(*wan, short, "balanced", shards=2).costs
    assert sum(block.parameter_bytes for block in sharded.blocks) == weights // 2
    # While a block runs, it and the next one are whole.
    assert sharded.blocks[0].activation_bytes == whole.blocks[0].activation_bytes + whole.blocks[0].parameter_bytes


def test_given_counts_beat_vae_aware(wan: tuple[BlockGraph, WanTransformer3DModel]) -> None:
    cut = plan_cut(*wan, machine(2), "vae-aware", counts=[6, 4], components=[Component("vae", preferred_rank=-1)])
    assert (cut.partition.counts, cut.owners) == ((6, 4), {"vae": 1})
