"""How data moves follows from where the ranks are."""

import pytest

from dit_pipelining.comm.transport import Place, transport_between, why_slow
from dit_pipelining.errors import ConfigError

ONE_HOST = [Place("a", "GPU 0", reaches=True), Place("a", "GPU 1", reaches=True)]
APART = [Place("a", "GPU 0"), Place("a", "GPU 1")]
TWO_HOSTS = [Place("a", "GPU 0", reaches=True), Place("b", "GPU 1", reaches=True)]
SHARED = [Place("a", "GPU 0", reaches=True)] * 2
CPUS = [Place("a", "cpu"), Place("b", "cpu")]
MIXED = [Place("a", "GPU 0", reaches=True), Place("a", "cpu")]


@pytest.mark.parametrize(
    ("places", "expected"),
    [(ONE_HOST, "peer"), (APART, "host"), (TWO_HOSTS, "host"), (SHARED, "host"), (CPUS, "host"), (MIXED, "host")],
)
def test_copy_engines_serve_gpus_of_one_host_that_reach_each_other_and_host_memory_all_others(places, expected):
    assert transport_between(places) == expected


@pytest.mark.parametrize("places", [ONE_HOST, APART, TWO_HOSTS])
def test_nccl_serves_ranks_that_have_a_gpu_each_and_ask_for_it(places):
    assert transport_between(places, "nccl") == "nccl"
    assert transport_between(places, "host") == "host"


@pytest.mark.parametrize(
    ("places", "wanted"),
    [(SHARED, "nccl"), (SHARED, "peer"), (CPUS, "nccl"), (CPUS, "peer"), (APART, "peer"), (TWO_HOSTS, "peer")],
)
def test_what_cannot_work_is_refused_with_the_places_and_what_can(places, wanted):
    with pytest.raises(ConfigError, match=f"transport='{wanted}' cannot work .*rank 0 on a .*possible are 'host'"):
        transport_between(places, wanted)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (ONE_HOST, ""),
        (CPUS, ""),
        (SHARED, "ranks share a GPU (give each one of its own)"),
        (APART, "the ranks' GPUs do not reach each other's memory (ParallelConfig(transport='nccl') may be faster)"),
        (TWO_HOSTS, "the ranks' GPUs are on several hosts (ParallelConfig(transport='nccl') may be faster)"),
    ],
)
def test_gpus_that_go_through_host_memory_are_told_why(places, expected):
    assert why_slow(places) == expected
