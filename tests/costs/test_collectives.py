"""Bytes and seconds of collectives, computed by hand."""

import pytest

from dit_pipelining.costs import collectives
from dit_pipelining.costs.devices import Link

LINK = Link("test", bytes_per_second=1250.0, latency_seconds=0.5)  # of which 1000 can be used


def test_ulysses_exchanges_four_tensors_and_keeps_its_own_part() -> None:
    # 800 bytes on 4 ranks: 200 each, of which 150 go to others; queries, keys, values, result.
    assert collectives.ulysses_bytes(800, 4) == 4 * 150
    assert collectives.ulysses_seconds(800, 4, LINK) == pytest.approx(4 * 0.5 + 0.6)


def test_a_ring_passes_keys_and_values_on() -> None:
    # 200 bytes of keys and 200 of values, three times.
    assert collectives.ring_bytes(800, 4) == 3 * 400
    assert collectives.ring_seconds(800, 4, LINK) == pytest.approx(3 * 0.5 + 1.2)


def test_tensor_parallelism_sums_twice_a_block() -> None:
    # An all-reduce of 800 bytes on 4 ranks: 600 to add them up, 600 to share the sums.
    assert collectives.tensor_bytes(800, 4) == 2 * 1200
    assert collectives.tensor_bytes(800, 4, reductions=3) == 3 * 1200
    assert collectives.tensor_seconds(800, 4, LINK) == pytest.approx(2 * 6 * 0.5 + 2.4)


def test_hsdp_gathers_the_other_shards() -> None:
    assert collectives.hsdp_bytes(800, 4) == 600
    assert collectives.hsdp_seconds(800, 4, LINK) == pytest.approx(3 * 0.5 + 0.6)


@pytest.mark.parametrize("kind", ["ulysses", "ring", "tensor", "hsdp"])
def test_one_rank_sends_nothing(kind: str) -> None:
    assert getattr(collectives, f"{kind}_bytes")(800, 1) == 0
    assert getattr(collectives, f"{kind}_seconds")(800, 1, LINK) == 0
