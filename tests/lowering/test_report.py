"""A report's numbers against numbers that were computed in another way."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit_pipelining.api import split_model
from dit_pipelining.lowering.report import report_split
from tests.zoo import CASES
from tests.zoo.case import build_inputs, build_model


@contextmanager
def counted_flops():
    """Counts what runs; the fused attention of CPUs is not in torch's table of FLOPs, its matrix products are."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


@pytest.fixture(scope="module")
def wan():
    case = CASES["WanTransformer3D"]
    model, inputs = build_model(case), build_inputs(case)
    return model, inputs, split_model(model, 2, inputs, counts=[1, 3])


def test_stages_hold_their_blocks_and_the_glue_they_use(wan):
    model, _, split = wan
    report = report_split(split, ["transformer"])
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    first, last = report.stages
    assert first.parameters >= block
    assert last.parameters >= 3 * block
    assert (first.first_block, first.end_block, last.first_block, last.end_block) == (0, 1, 1, 4)
    assert (first.blocks, last.blocks) == (("blocks 0",), ("blocks 1-3",))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert report.parameters == total
    held = [{name for name, _ in stage.named_parameters()} for stage in split.stages]
    copies = sum(model.get_parameter(name).numel() for name in held[0] & held[1])
    assert report.unused_parameters == 0
    assert report.extra_parameters == pytest.approx(copies / total)
    assert report.largest_stage == pytest.approx(last.parameters * 2 / total)
    assert last.parameter_bytes == 4 * last.parameters


def test_flops_of_the_stages_are_those_of_running_them(wan):
    model, inputs, split = wan
    report = report_split(split, ["transformer"])
    with counted_flops() as whole:
        model(**inputs)
    assert report.flops == whole.get_total_flops()
    graph, call = split.resolve(inputs)
    received = ()
    for stage, entry in zip(split.stages, report.stages, strict=True):
        with counted_flops() as counter:
            # Without what another stage, or another step, may have kept.
            fresh = type(call)(
                call.kwargs, {k: t.clone() for k, t in call.tensors.items()}, call.objects, call.signature
            )
            received = stage.run(graph, received, fresh.leaves)
        assert entry.flops == counter.get_total_flops()
    shares = [report.flops_share(stage) for stage in report.stages]
    assert sum(shares) == pytest.approx(1.0)
    assert report.flops_imbalance == pytest.approx(max(shares) * 2)


def test_a_boundary_lists_the_tensors_that_are_sent(wan):
    _, inputs, split = wan
    report = report_split(split, ["transformer"])
    graph, call = split.resolve(inputs)
    with torch.no_grad():
        sent = split.stages[0].run(graph, (), call.leaves)
    (crossings,) = report.boundaries
    assert [crossing.bytes for crossing in crossings] == [tensor.nbytes for tensor in sent]
    assert [crossing.dtype for crossing in crossings] == ["float32"] * len(sent)
    assert max(crossings, key=lambda crossing: crossing.bytes).origin == "blocks.0"


def test_side_blocks_are_named_on_the_stage_that_runs_them():
    case = CASES["WanVACETransformer3D"]
    split = split_model(build_model(case), 2, build_inputs(case), counts=[1, 3])
    first, last = report_split(split, ["transformer"]).stages
    assert first.side_blocks == ("vace_blocks 0",)
    assert "vace_blocks" in " ".join(last.side_blocks)


def test_values_of_glue_name_the_modules_behind_them(wan):
    _, _, split = wan
    (crossings,) = report_split(split, ["transformer"]).boundaries
    assert any("condition_embedder.time_proj" in crossing.origin for crossing in crossings)
