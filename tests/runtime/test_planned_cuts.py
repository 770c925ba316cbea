"""A run cuts its transformer where `dit-pipelining show` says that it will."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch

from dit_pipelining.api import ParallelConfig, parallelize
from dit_pipelining.cli.study import Question, study
from dit_pipelining.runtime.attach import EXECUTOR
from partitioners import RankSpec
from tests.distributed import RankPool
from tests.zoo import CASES
from tests.zoo.case import build_inputs

FLUX = {**CASES["FluxTransformer"].init, "num_attention_heads": 4, "num_layers": 3, "num_single_layers": 7}
UNEVEN = "rtx4090,rtx3090"
LAYOUTS: dict[str, dict[str, Any]] = {
    "ulysses": dict(pipeline_parallel_size=2, ulysses_degree=2, ranks=UNEVEN),
    "ring": dict(pipeline_parallel_size=2, ring_degree=2, ranks="rtx3090,rtx4090"),
    "tensor": dict(pipeline_parallel_size=2, tensor_parallel_size=2, ranks=UNEVEN),
    "hsdp and cfg": dict(pipeline_parallel_size=2, cfg_parallel_size=2, use_hsdp=True, ranks="rtx4090,rtx3090*3"),
}


def planned(init: dict[str, Any], layouts: tuple[dict[str, Any], ...]) -> list[tuple[tuple[int, ...], list[float]]]:
    """Blocks per stage that a run of each layout has, and the seconds of its stages, by its plan."""
    found = []
    for layout in layouts:
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        transformer = diffusers.FluxTransformer2DModel(**init).eval()
        pipeline = diffusers.FluxPipeline(scheduler, None, None, None, None, None, transformer)
        parallelize(pipeline, ParallelConfig(**layout))
        with torch.no_grad():
            cut = transformer.__dict__[EXECUTOR].split_for(build_inputs(CASES["FluxTransformer"])).cut
        found.append((cut.partition.counts, cut.partition.compute_seconds(cut.costs, cut.ranks)))
    return found


def shown(folder: Path, layout: dict[str, Any]) -> tuple[tuple[int, ...], list[float]]:
    """The same, as `show` tells it without weights."""
    config = ParallelConfig(**layout)
    file, inputs = folder / "config.json", folder / "inputs.json"
    file.write_text(json.dumps({"_class_name": "FluxTransformer2DModel", **FLUX}))
    described = {
        name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, torch.Tensor)
        else {"value": value}
        for name, value in build_inputs(CASES["FluxTransformer"]).items()
    }
    inputs.write_text(json.dumps(described))
    picture = study(Question(model=str(file), config=config, inputs=inputs, dtype="float32", steps=2))
    return picture.reports[0].partition, list(picture.timelines[0].workload.stage_seconds)


def test_a_run_is_cut_where_it_was_shown(ranks: RankPool, tmp_path: Path) -> None:
    runs = ranks.run(4, planned, FLUX, tuple(LAYOUTS.values()))
    assert runs == [[shown(tmp_path, layout) for layout in LAYOUTS.values()]] * 4


def held_of_two_experts(init: dict[str, Any], share: float) -> tuple[list[tuple[int, ...]], int, int]:
    """Blocks per stage of both transformers, bytes of weights that this rank has of them, and how many it may have."""
    experts = [diffusers.WanTransformer3DModel(**init).eval() for _ in range(2)]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.WanPipeline(
        None, None, None, scheduler, transformer=experts[0], transformer_2=experts[1], boundary_ratio=0.9
    )
    limit = round(share * sum(parameter.nbytes for parameter in experts[0].parameters()))
    parallelize(pipeline, ParallelConfig(pipeline_parallel_size=2, ranks=[RankSpec(), RankSpec(memory_bytes=limit)]))
    inputs = build_inputs(CASES["WanTransformer3D"])
    with torch.no_grad():
        counts = [expert.__dict__[EXECUTOR].split_for(inputs).partition.counts for expert in experts]
    held = sum(own.nbytes for expert in experts for own in expert.parameters() if own.device.type != "meta")
    return counts, held, limit


def test_two_experts_get_a_cut_with_which_both_fit(ranks: RankPool) -> None:
    init = {**CASES["WanTransformer3D"].init, "num_layers": 8, "num_attention_heads": 8, "ffn_dim": 512}
    _, (counts, held, limit) = ranks.run(2, held_of_two_experts, init, 0.45)
    assert counts[0] == counts[1]
    assert counts[0][1] > 0
    assert held <= limit
