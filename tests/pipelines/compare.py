"""Run a case in one process and over ranks, and compare."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dit_pipelining.api import ParallelConfig, generate, parallelize
from dit_pipelining.runtime.attach import EXECUTOR
from tests.distributed import RankPool

from . import CASES
from .case import PipelineCase, arguments, build_pipeline, call_pipeline, outputs_of

LAYOUTS: dict[str, dict[str, int]] = {
    "pp2": dict(pipeline_parallel_size=2),
    "pp3": dict(pipeline_parallel_size=3),
    "cfg2": dict(cfg_parallel_size=2),
    "pp2-cfg2": dict(pipeline_parallel_size=2, cfg_parallel_size=2),
    "pp2-mb2": dict(pipeline_parallel_size=2, microbatches=2),
}
"""Name -> degrees."""


def plain(name: str) -> list[torch.Tensor]:
    """What the case gives in one process; on a rank, whose number of threads is that of the ranks that are compared."""
    outputs = call_pipeline(CASES[name], build_pipeline(CASES[name]))
    assert outputs
    assert all(output.isfinite().all() for output in outputs)
    assert any(output.numel() and output.double().std() > 1e-4 for output in outputs)
    return outputs


def spread(name: str, layout: str) -> tuple[list[torch.Tensor], bool]:
    """What the case gives on this rank of a layout, and whether a batch was cut; called twice, the same both times."""
    case = CASES[name]
    pipeline = parallelize(build_pipeline(case), ParallelConfig(**LAYOUTS[layout]))
    cuts: list[int] = []
    executors = [part.__dict__[EXECUTOR] for part in pipeline.components.values() if EXECUTOR in vars_of(part)]
    for cutter in [cutter for executor in executors for cutter in (executor._over_replicas, executor._along_stages)]:
        cutter.cut = _counted(cutter.cut, cuts)
    first = call_pipeline(case, pipeline)
    assert cuts, "the transformer was not called"
    assert_close(call_pipeline(case, pipeline), first, 0.0)
    return first, max(cuts) > 1


def vars_of(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _counted(cut: Callable[..., Sequence[Any]], counts: list[int]) -> Callable[..., Sequence[Any]]:
    def counted(*args: Any) -> Sequence[Any]:
        parts = cut(*args)
        counts.append(len(parts))
        return parts

    return counted


def assert_close(outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> None:
    """Equal in number, shape, dtype and bits, or within an absolute and relative tolerance."""
    assert len(outputs) == len(expected)
    for output, other in zip(outputs, expected, strict=True):
        if tolerance:
            torch.testing.assert_close(output, other, rtol=tolerance, atol=tolerance)
        else:
            assert output.dtype == other.dtype
            assert torch.equal(output, other), f"differs by {(output.double() - other.double()).abs().max():.1e}"


def compare(ranks: RankPool, case: PipelineCase, layout: str, expected: Sequence[torch.Tensor]) -> str:
    """Run a case over ranks. Returns "bits", or the tolerance within which a cut batch is equal.

    Raises:
        AssertionError: a rank gives something else, or a batch was cut although the case does not say so.
    """
    config = ParallelConfig(**LAYOUTS[layout])
    is_cut = case.cut and config.cfg_parallel_size * config.microbatches > 1
    for outputs, was_cut in ranks.run(config.world_size, spread, case.name, layout):
        assert was_cut == is_cut, "a batch was cut" if was_cut else "no batch was cut"
        assert_close(outputs, expected, case.tolerance if is_cut else 0.0)
    return f"{case.tolerance:g}" if is_cut else "bits"


SEEDS = (7, 8)
"""Of requests that differ in nothing else."""


def plain_requests(name: str) -> list[torch.Tensor]:
    """What two calls of a case give in one process, one after the other."""
    pipeline = build_pipeline(CASES[name])
    return outputs_of([pipeline(**arguments(CASES[name], pipeline, seed)) for seed in SEEDS])


def spread_requests(name: str, layout: str) -> list[torch.Tensor]:
    """What they give side by side on this rank of a layout."""
    pipeline = parallelize(build_pipeline(CASES[name]), ParallelConfig(**LAYOUTS[layout]))
    return outputs_of(generate(pipeline, [arguments(CASES[name], pipeline, seed) for seed in SEEDS]))
