"""Bytes of each rank, against the tensors that are there."""

from dataclasses import replace

import pytest
import torch

from dit_pipelining.api import split_model
from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.capture.nodes import value_bytes
from dit_pipelining.planning.components import Components
from dit_pipelining.planning.degrees import Degrees
from dit_pipelining.planning.memory import rank_memory
from dit_pipelining.planning.timeline import Workload
from dit_pipelining.sharding.tensor_plans import tensor_plan
from tests.zoo import CASES
from tests.zoo.case import build_inputs, build_model

BESIDE = Components(encoder_bytes=1000, vae_bytes=100, decode_bytes=10)


@pytest.fixture(scope="module")
def split():
    case = CASES["WanTransformer3D"]
    return split_model(build_model(case), 3, build_inputs(case), counts=[1, 2, 1])


def workload(**options):
    return Workload(
        stage_seconds=(1.0,) * 3, transfer_seconds=(0.0,) * 2, encode_rank=0, decode_rank=2, steps=50, **options
    )


def test_weights_are_counted_once_and_copies_apart(split):
    ranks = rank_memory([(split, 1)], workload(), BESIDE)
    for rank, stage in zip(ranks, split.stages, strict=True):
        held = [*stage.parameters(), *stage.buffers()]
        assert rank.weights + rank.replicated == sum(tensor.nbytes for tensor in held)
    every = {id(tensor): tensor.nbytes for stage in split.stages for tensor in (*stage.parameters(), *stage.buffers())}
    assert sum(rank.weights for rank in ranks) == sum(every.values())
    assert ranks[0].replicated == 0 < ranks[1].replicated


def test_two_transformers_share_activations_and_buffers(split):
    one = rank_memory([(split, 1)], workload(), BESIDE)
    two = rank_memory([(split, 2)], workload(), BESIDE)
    assert [rank.weights for rank in two] == [2 * rank.weights for rank in one]
    assert [(rank.activations, rank.buffers) for rank in two] == [(rank.activations, rank.buffers) for rank in one]


def test_components_are_on_their_owners(split):
    ranks = rank_memory([(split, 1)], workload(), BESIDE)
    assert [(rank.encoders, rank.vae) for rank in ranks] == [(1000, 0), (0, 0), (0, 100)]
    large = rank_memory([(split, 1)], workload(), Components(decode_bytes=10**9))
    assert large[2].activations == 10**9 > large[0].activations


def test_without_owners_every_rank_holds_the_components(split):
    everywhere = replace(workload(), encode_rank=None, decode_rank=None)
    ranks = rank_memory([(split, 1)], everywhere, BESIDE)
    assert [(rank.encoders, rank.vae) for rank in ranks] == [(1000, 100)] * 3
    last = replace(workload(), encode_rank=-2, decode_rank=-1)
    ranks = rank_memory([(split, 1)], last, BESIDE)
    assert [(rank.encoders, rank.vae) for rank in ranks] == [(0, 0), (1000, 0), (0, 100)]


def test_buffers_are_slots_on_every_rank_and_copies_of_what_arrives_and_of_what_leaves(split):
    crossing = [sum(value.bytes for value in values) for values in split.boundaries]
    (result,) = map(value_bytes, split.graph.output_nodes)
    slots = 2 * (max(crossing) + result)
    ranks = rank_memory([(split, 1)], workload(requests=8), BESIDE)
    assert [rank.buffers - slots for rank in ranks] == [2 * crossing[0], crossing[0] + 2 * crossing[1], crossing[1]]
    gpipe = rank_memory([(split, 1)], workload(requests=5, schedule="gpipe"), BESIDE)
    assert gpipe[1].buffers == 5 * (crossing[0] + crossing[1])


def test_requests_in_flight_hold_their_calls_inputs_and_results(split):
    inputs = build_inputs(CASES["WanTransformer3D"]).values()
    given = sum(value.nbytes for value in inputs if isinstance(value, torch.Tensor))
    (result,) = map(value_bytes, split.graph.output_nodes)
    kept = [stage.kept_bytes(split.graph) for stage in split.stages]

    def predicted(**options):
        return [own.requests for own in rank_memory([(split, 1)], workload(**options), BESIDE)]

    a_call = given + 2 * result
    assert predicted() == [a_call + each + once for each, once in kept]
    assert predicted(requests=3, calls_per_step=2) == [6 * (a_call + each) + once for each, once in kept]
    assert predicted(requests=9, in_flight=3) == predicted(requests=3)
    assert predicted(requests=9, schedule="sequential") == predicted()
    # Every rank of both replicas runs the whole pipeline, and its stage half of the calls.
    assert predicted(requests=3, calls_per_step=2, replicas=2) == [6 * a_call + 3 * each + once for each, once in kept]


def test_one_process_has_no_buffers_and_one_request_at_a_time(split):
    whole = split_model(split.model, 1, build_inputs(CASES["WanTransformer3D"]))
    alone = Workload(stage_seconds=(1.0,), transfer_seconds=(), encode_rank=0, decode_rank=0)
    (one,) = rank_memory([(whole, 1)], alone, BESIDE)
    assert one.buffers == 0
    assert rank_memory([(whole, 1)], replace(alone, requests=5), BESIDE) == (one,)


def test_ranks_that_share_a_stage_hold_what_they_share(split):
    """Against the layers that tensor parallelism cuts, and the blocks that HSDP shards."""
    alone = rank_memory([(split, 1)], workload(), BESIDE)
    cut = tensor_plan(split.model, find_blocks(split.model)).layers
    halves = rank_memory([(split, 1)], workload(), BESIDE, Degrees(pipeline=3, tensor=2))
    shards = rank_memory([(split, 1)], workload(), BESIDE, Degrees(pipeline=3, ring=4, shards=4))
    for stage, whole, half, quarter in zip(split.stages, alone, halves, shards, strict=True):
        named = dict(stage.named_parameters())
        kept = {name for name, style in cut.items() if style.style == "row"}
        divided = sum(
            tensor.nbytes
            for name, tensor in named.items()
            if (layer := name.rpartition(".")[0]) in cut and not (layer in kept and name.endswith("bias"))
        )
        assert half.weights + half.replicated == whole.weights + whole.replicated - divided // 2
        inside = sum(tensor.nbytes for name, tensor in named.items() if name.startswith("blocks."))
        assert quarter.weights + quarter.replicated == whole.weights + whole.replicated - inside * 3 // 4
        assert quarter.buffers < whole.buffers


def test_parts_of_text_encoders_fill_the_ranks_of_a_stage_first(split):
    beside = Components(encoder_bytes=1000, split_bytes=900, encoder_parts=3)
    ranks = rank_memory([(split, 1)], workload(), beside, Degrees(pipeline=3, ulysses=2))
    assert [rank.encoders for rank in ranks] == [100 + 300, 300, 0]
