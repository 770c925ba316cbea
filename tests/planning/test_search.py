"""Searching degrees: every way is looked at, and each costs what follows by hand."""

import math
from dataclasses import replace

import pytest

from dit_pipelining.costs.devices import DeviceProfile, Link
from dit_pipelining.costs.inside import BlockWork
from dit_pipelining.planning.components import Components
from dit_pipelining.planning.degrees import Degrees, Divides, every_way, problem_of
from dit_pipelining.planning.search import search, sharded_costs
from dit_pipelining.planning.work import ModelWork
from dit_pipelining.weights.placement import ComponentSize
from partitioners import BlockCost

LINK = Link("test", bytes_per_second=1250.0, latency_seconds=0.0)  # of which 1000 can be used
DEVICE = DeviceProfile("test", "Test", 1e12, 1e12, 10_000, 1e12, dict(pcie=LINK), reserved_bytes=0)
BLOCK = BlockWork(matrix_seconds=7.0, other_seconds=1.0, weights=100, cut_weights=100, activations=40, hidden=80)
WORK = ModelWork(
    blocks=(BLOCK,) * 4,
    prologue=BlockCost(0.0, boundary_bytes=80),
    epilogue=BlockCost(0.0),
    result_bytes=0,
    divides=Divides(heads=8, tensor_sizes=(1, 2, 4, 8)),
    steps=2,
)


def test_every_way_is_there_once() -> None:
    ways = list(every_way(8))
    assert len(set(ways)) == len(ways)
    assert all(way.size == 8 for way in ways)
    plain = [way for way in ways if way.shards == 1]
    assert len(plain) == math.comb(3 + 5, 5)  # three factors of two over six dimensions
    assert {way.shards for way in ways if (way.cfg, way.ulysses, way.ring, way.tensor) == (2, 2, 1, 1)} == {1, 4}
    assert all(way.shards == 1 for way in ways if way.tensor > 1)
    assert list(every_way(1)) == [Degrees()]


def test_ways_that_cannot_be_say_why() -> None:
    divides = Divides(heads=12, tensor_sizes=(1, 2, 3, 6))

    def problem(divides: Divides = divides, **degrees: int) -> str:
        return problem_of(Degrees(**degrees), divides=divides, blocks=3, calls=2)

    assert problem(ulysses=2, tensor=2, pipeline=3, cfg=2) == ""
    assert "12 heads do not divide by ulysses x tensor = 24" in problem(ulysses=4, tensor=6)
    assert "tensor = 4 is none of 1, 2, 3, 6" in problem(tensor=4)
    assert "4 stages are more than 3 blocks" in problem(pipeline=4)
    assert "4 replicas have 2 call(s)" in problem(cfg=4)
    refused = Divides(refusals=(("sequence", "no plan for its tokens"), ("tensor", "an unknown attention")))
    assert problem(refused, ring=2) == "no plan for its tokens"
    assert problem(refused, ulysses=2) == "no plan for its tokens"
    assert problem(refused, tensor=2) == "an unknown attention"
    assert problem(refused, pipeline=2) == ""


@pytest.mark.parametrize(
    ("degrees", "seconds"),
    [
        (Degrees(), 8.0),
        (Degrees(ulysses=2), 4.0 + 4 * 20 / 1000),  # 80 bytes on 2 ranks: 20 of 40 leave, four times
        (Degrees(ring=2), 4.0 + 2 * 40 / 1000),
        (Degrees(ring=2, ulysses=2), 2.0 + 4 * 10 / 1000 + 2 * 20 / 1000),
        (Degrees(tensor=2), 3.5 + 1.0 + 2 * 80 / 1000),  # norms are not divided; two sums of 2 x 40 bytes
        (Degrees(ulysses=2, tensor=2), 1.75 + 0.5 + 4 * 10 / 1000 + 2 * 40 / 1000),
        (Degrees(ulysses=2, shards=2), 4.0 + 4 * 20 / 1000),  # 50 bytes of weights come meanwhile
        (Degrees(cfg=2, pipeline=2), 8.0),
    ],
)
def test_what_a_block_takes(degrees: Degrees, seconds: float) -> None:
    assert sharded_costs(WORK, degrees, LINK).blocks[0].seconds == pytest.approx(seconds)


def test_weights_that_come_slower_than_a_block_computes_are_waited_for() -> None:
    heavy = replace(WORK, blocks=(replace(BLOCK, weights=20_000, cut_weights=0),) * 4)
    assert sharded_costs(heavy, Degrees(ulysses=2, shards=2), LINK).blocks[0].seconds == pytest.approx(10.0)


def test_what_a_block_holds() -> None:
    two = replace(WORK, copies=2)
    plain = sharded_costs(two, Degrees(), LINK).blocks[0]
    assert (plain.parameter_bytes, plain.activation_bytes, plain.boundary_bytes) == (200, 40, 80)
    tensor = sharded_costs(two, Degrees(tensor=4), LINK).blocks[0]
    assert (tensor.parameter_bytes, tensor.activation_bytes, tensor.boundary_bytes) == (50, 40, 80)
    sequence = sharded_costs(two, Degrees(ulysses=2, ring=2), LINK).blocks[0]
    assert (sequence.parameter_bytes, sequence.activation_bytes, sequence.boundary_bytes) == (200, 10, 20)
    hsdp = sharded_costs(two, Degrees(ulysses=2, shards=2), LINK).blocks[0]
    assert (hsdp.parameter_bytes, hsdp.activation_bytes) == (
        100,
        20 + 2 * 50,
    )  # two blocks of the one that works are whole


def test_replicas_share_a_batch() -> None:
    batched = replace(WORK, batch=2)
    assert sharded_costs(batched, Degrees(cfg=2), LINK).blocks[0].seconds == 4.0
    found = {way.degrees: way for way in search(batched, 2, DEVICE).ways}
    assert found[Degrees(cfg=2)].latency == pytest.approx(2 * 4 * 4.0)
    assert found[Degrees(data=2)].latency == pytest.approx(2 * 4 * 8.0)


def test_goals_order_the_ways() -> None:
    found = {goal: search(WORK, 2, DEVICE, goal=goal) for goal in ("latency", "throughput", "memory")}
    assert found["latency"].ways[0].degrees == Degrees(ulysses=2)  # HSDP is as fast, but takes more
    assert found["latency"].ways[0].latency == pytest.approx(2 * 4 * 4.08)
    best = found["throughput"].ways[0]
    assert best.degrees == Degrees(data=2)  # sends nothing
    assert best.requests_per_hour == pytest.approx(3600 * 2 / (2 * 4 * 8.0))
    memory = found["memory"].ways[0]
    assert memory.degrees == Degrees(tensor=2)
    assert memory.memory_bytes == 4 * 50 + 40
    reasons = {refused.reason for refused in found["memory"].refused}
    assert reasons == {"2 replicas have 1 call(s) a step to share"}


def test_a_pipeline_takes_turns_for_one_request_and_none_for_many() -> None:
    way = next(way for way in search(WORK, 2, DEVICE).ways if way.degrees == Degrees(pipeline=2))
    hop = 80 / 1000
    assert way.counts == (2, 2)
    assert way.latency == pytest.approx(2 * (4 * 8.0 + hop))
    assert way.computing == pytest.approx(0.5, abs=0.01)
    assert way.requests_per_hour == pytest.approx(3600 * 4 / (4 * 2 * 16.0 + 16.0 + hop))


def test_what_does_not_fit_is_refused() -> None:
    small = replace(DEVICE, memory_bytes=330)
    found = search(WORK, 2, small, goal="latency")
    assert {str(way.degrees) for way in found.ways} == {"tensor2", "ring2 x shards2", "ulysses2 x shards2"}
    lacks = {refused.degrees: refused.lacks_bytes for refused in found.refused if "memory" in refused.reason}
    assert lacks[Degrees(data=2)] == 440 - 330
    assert lacks[Degrees(ulysses=2)] == 420 - 330


def test_components_lie_on_the_first_and_the_last_stage() -> None:
    sizes = {"text_encoder": ComponentSize("encoder", 1000), "vae": ComponentSize("decoder", 500)}
    beside = Components(sizes, {"text_encoder": 1000, "vae": 500}, {"text_encoder": 3.0, "vae": 5.0}, decode_bytes=100)
    found = {way.degrees: way for way in search(replace(WORK, beside=beside), 2, DEVICE).ways}
    assert found[Degrees(data=2)].memory_bytes == 400 + 40 + 1600
    assert found[Degrees(data=2)].latency == pytest.approx(2 * 4 * 8.0 + 3 + 5)
    assert found[Degrees(tensor=2)].latency == pytest.approx(2 * 4 * (4.5 + 0.16) + 3 + 5)


TILED = Components(
    {"vae": ComponentSize("decoder", 500, tiles=True)},
    {"vae": 500},
    {"vae": 6.0},
    decode_bytes=100,
    latents=60,
    tiles=((20,) * 4,),
)


def test_a_decode_is_shared_in_whole_tiles() -> None:
    assert TILED.decode(1) == (6.0, 100)
    assert TILED.decode(2) == (4.0, 34)  # two tiles of a third of the latents each
    assert TILED.decode(3) == (4.0, 34)
    assert TILED.decode(4) == (2.0, 34)
    assert replace(TILED, tiles=((20, 20), (20, 20))).decode(4) == (4.0, 34)  # one pair after the other
    assert replace(TILED, tiles=()).decode(4) == (6.0, 100)


def test_tiles_go_to_as_many_ranks_as_are_done_first() -> None:
    found = {
        way.degrees.ulysses: way
        for way in search(replace(WORK, beside=TILED), 4, DEVICE).ways
        if way.degrees.shards == 1
    }
    assert found[4].degrees == Degrees(ulysses=4, tiles=4)
    assert "--vae-patch-parallel-size 4" in found[4].degrees.flags()
    plain = next(way for way in search(WORK, 4, DEVICE).ways if way.degrees == Degrees(ulysses=4))
    assert found[4].latency == pytest.approx(plain.latency + 2.0)
    # Tiles are smaller than the whole picture, so that both stages hold the VAE and still less than one did.
    large = replace(TILED, decode_bytes=300)
    memory = {way.degrees for way in search(replace(WORK, beside=large), 2, DEVICE, goal="memory").ways}
    assert Degrees(pipeline=2, tiles=2) in memory


def test_tokens_that_do_not_divide_are_said_in_the_flags() -> None:
    odd = replace(WORK, divides=replace(WORK.divides, tokens=6))
    flags = {way.degrees.ulysses: way.degrees.flags() for way in search(odd, 4, DEVICE).ways if way.degrees.data == 1}
    assert "--ulysses-mode anything" in flags[4]
    assert "--ulysses-mode" not in flags[2]
