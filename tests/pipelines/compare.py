"""Run a case in one process and over ranks, and compare."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dit_pipelining.api import ParallelConfig, parallelize
from dit_pipelining.runtime.attach import EXECUTOR
from tests.distributed import RankPool

from . import CASES
from .case import PipelineCase, build_pipeline, call_pipeline

LAYOUTS: dict[str, dict[str, int]] = {
    "pp2": dict(pipeline_parallel_size=2),
    "pp3": dict(pipeline_parallel_size=3),
    "cfg2": dict(cfg_parallel_size=2),
    "pp2-cfg2": dict(pipeline_parallel_size=2, cfg_parallel_size=2),
}
"""Name -> degrees."""


def world_size(layout: str) -> int:
    """Ranks of a layout."""
    return ParallelConfig(**LAYOUTS[layout]).world_size


def plain(name: str) -> list[torch.Tensor]:
    """What the case gives in one process; on a rank, whose number of threads is that of the ranks that are compared."""
    outputs = call_pipeline(CASES[name], build_pipeline(CASES[name]))
    assert outputs
    for output in outputs:
        assert output.isfinite().all()
        assert output.double().std() > 1e-4
    return outputs


def spread(name: str, layout: str) -> tuple[list[torch.Tensor], bool]:
    """What the case gives on this rank of a layout, and whether a batch was cut; called twice, the same both times."""
    case = CASES[name]
    pipeline = parallelize(build_pipeline(case), ParallelConfig(**LAYOUTS[layout]))
    cuts: list[int] = []
    executors = [part.__dict__[EXECUTOR] for part in pipeline.components.values() if EXECUTOR in vars_of(part)]
    for executor in executors:
        executor._over_replicas.cut = _counted(executor._over_replicas.cut, cuts)
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
    replicas = ParallelConfig(**LAYOUTS[layout]).cfg_parallel_size
    for outputs, was_cut in ranks.run(world_size(layout), spread, case.name, layout):
        assert was_cut == (case.cut and replicas > 1), "a batch was cut" if was_cut else "no batch was cut"
        assert_close(outputs, expected, case.tolerance if was_cut else 0.0)
    return f"{case.tolerance:g}" if case.cut and replicas > 1 else "bits"
