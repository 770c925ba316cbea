"""The stages under torch's own schedule, with metadata known in advance."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe

from dit_pipelining.api import split_model
from dit_pipelining.lowering.boundary import with_plain_strides
from dit_pipelining.runtime.microbatches import Cutter, merge
from tests.distributed import RankPool
from tests.zoo import CASES, build_inputs, build_model


def gpipe(name: str, stages: int) -> tuple[list[torch.Tensor] | None, int]:
    """Two microbatches through ScheduleGPipe; also how often this rank's first block ran."""
    model = build_model(CASES[name])
    inputs = build_inputs(CASES[name])
    halves = Cutter("hidden_states", 2).cut(inputs)
    assert len(halves) == 2
    split = split_model(model, stages, halves[0], partitioner="uniform")
    rank = dist.get_rank()
    runs: list[int] = []
    start, _ = split.partition.ranges[rank]
    block = model.get_submodule(str(split.graph.blocks[start].target))
    block.register_forward_hook(lambda *_: runs.append(1))
    spec = split.kwargs_chunk_spec(inputs)
    schedule = ScheduleGPipe(split.pipeline_stage(rank, "cpu"), n_microbatches=2, kwargs_chunk_spec=spec)
    output = schedule.eval(**inputs)
    return (list(output) if output is not None else None), len(runs)


@pytest.mark.parametrize(("name", "stages"), [("WanTransformer3D@batch", 2), ("FluxTransformer@guidance-batch", 3)])
def test_the_schedule_gives_the_model_s_output(ranks: RankPool, name: str, stages: int) -> None:
    model, inputs = build_model(CASES[name]), build_inputs(CASES[name])
    with torch.no_grad():
        parts: list[Any] = [model(**part) for part in Cutter("hidden_states", 2).cut(inputs)]
    expected = merge(parts)
    results = ranks.run(stages, gpipe, name, stages)
    assert all(output is None for output, _ in results[:-1])
    last = results[-1][0]
    assert last is not None
    assert torch.equal(last[0], expected[0])
    # One run per microbatch: no extra forward to learn shapes.
    assert [runs for _, runs in results] == [2] * stages


def test_a_stage_gives_torch_s_schedules_the_strides_that_it_announces() -> None:
    # A sample cut out of a batch: its first dimension has one element and the stride of the whole batch.
    model, inputs = build_model(CASES["WanTransformer3D@batch"]), build_inputs(CASES["WanTransformer3D@batch"])
    split = split_model(model, 2, Cutter("hidden_states", 2).cut(inputs)[0])
    part = Cutter("hidden_states", 2).cut(inputs)[1]
    tensors: tuple[torch.Tensor, ...] = ()
    with torch.no_grad():
        for stage in split.stages:
            received, sent = stage.wire_metadata(split.graph)
            assert [tensor.stride() for tensor in tensors] == [tensor.stride() for tensor in received]
            tensors = stage(*tensors, **part)
            assert [tensor.stride() for tensor in tensors] == [tensor.stride() for tensor in sent]


def test_strides_are_those_of_a_new_tensor_where_a_dimension_has_one_element() -> None:
    odd = torch.arange(24.0).view(4, 2, 3)[1:2]
    odd = odd.as_strided((1, 2, 3), (99, 3, 1), odd.storage_offset())
    plain = with_plain_strides(odd)
    assert plain.stride() == (6, 3, 1)
    assert torch.equal(plain, odd)
    assert with_plain_strides(odd.transpose(1, 2)).stride() == (99, 1, 3)
