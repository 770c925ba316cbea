"""Pipelines whose stages are divided inside, by heads or by shards of weights, give what one process gives."""

from math import prod
from typing import Any

import pytest
import torch

from dit_pipelining.api import ParallelConfig, parallelize
from dit_pipelining.weights.pipelines import is_transformer
from tests.distributed import RankPool
from tests.pipelines import CASES
from tests.pipelines.case import build_pipeline, call_pipeline
from tests.pipelines.compare import plain
from tests.sharding.families import FAMILIES

TOLERANCE = dict(rtol=2e-5, atol=1e-5)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": dict(tensor_parallel_size=2),
    "pp2-tp2": dict(pipeline_parallel_size=2, tensor_parallel_size=2),
    "cfg2-tp2": dict(cfg_parallel_size=2, tensor_parallel_size=2),
    "r2-tp2": dict(ring_degree=2, tensor_parallel_size=2, ulysses_mode="anything"),
    "hsdp2": dict(cfg_parallel_size=2, use_hsdp=True),
    "pp2-hsdp2": dict(pipeline_parallel_size=2, cfg_parallel_size=2, use_hsdp=True),
    "pp2-u2-hsdp2": dict(pipeline_parallel_size=2, ulysses_degree=2, use_hsdp=True, ulysses_mode="anything"),
    "cfg2-r2-hsdp4": dict(cfg_parallel_size=2, ring_degree=2, use_hsdp=True, ulysses_mode="anything"),
    "pp2-cfg2-tp2": dict(pipeline_parallel_size=2, cfg_parallel_size=2, tensor_parallel_size=2),
    "pp2-u2-tp2": dict(pipeline_parallel_size=2, ulysses_degree=2, tensor_parallel_size=2, ulysses_mode="anything"),
}
EIGHT = ("pp2-cfg2-tp2", "pp2-u2-tp2")


def ranks_of(layout: str) -> int:
    return prod(size for name, size in LAYOUTS[layout].items() if type(size) is int)


def spread(name: str, layout: str) -> list[torch.Tensor]:
    return call_pipeline(CASES[name], parallelize(build_pipeline(CASES[name]), ParallelConfig(**LAYOUTS[layout])))


def compare(ranks: RankPool, name: str, layout: str) -> None:
    [wanted] = ranks.run(1, plain, name)
    for outputs in ranks.run(ranks_of(layout), spread, name, layout):
        for output, other in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(output, other, **TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in EIGHT])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.pipeline])
def test_every_family_in_every_layout_gives_what_one_process_gives(ranks: RankPool, family: str, layout: str) -> None:
    name = FAMILIES[family].pipeline
    assert name is not None
    compare(ranks, name, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", EIGHT)
def test_three_dimensions_go_together_on_eight_ranks(layout: str) -> None:
    ranks = RankPool(8)
    try:
        compare(ranks, "StableDiffusion3Pipeline", layout)
    finally:
        ranks.close()


@pytest.mark.parametrize("layout", ["tp2", "hsdp2"])
def test_a_guider_looks_at_blocks_whose_weights_are_cut_or_sharded(ranks: RankPool, layout: str) -> None:
    compare(ranks, "HunyuanVideo15Pipeline", layout)


def with_shards(names: tuple[str, ...]) -> dict[str, float]:
    """By class of transformer: the largest error of the first of these pipelines that has it, relative to the largest value."""
    errors: dict[str, float] = {}
    for name in names:
        pipeline = build_pipeline(CASES[name])
        classes = {
            type(part).__name__
            for part in pipeline.components.values()
            if part is not None and is_transformer(type(part))
        }
        if classes <= errors.keys():
            continue
        wanted = call_pipeline(CASES[name], build_pipeline(CASES[name]))
        found = call_pipeline(CASES[name], parallelize(pipeline, ParallelConfig(**LAYOUTS["hsdp2"])))
        error = max(
            ((own.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-3)).item()
            for own, other in zip(found, wanted, strict=True)
            if other.is_floating_point()
        )
        errors |= dict.fromkeys(classes - errors.keys(), error)
    return errors


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_every_class_can_be_sharded(ranks: RankPool, part: int) -> None:
    for errors in ranks.run(2, with_shards, tuple(CASES)[part::8]):
        assert errors
        assert not {name: error for name, error in errors.items() if not error < 1e-4}
