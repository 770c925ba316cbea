"""The front door: split a model, load or parallelise a pipeline, generate."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dit_pipelining.capture.graph import CaptureCache
from dit_pipelining.capture.signature import bind
from dit_pipelining.costs.model_costs import model_costs
from dit_pipelining.lowering.split import SplitModel
from partitioners import Partitioner, RankSpec, resolve_partition

__all__ = ["SplitModel", "split_model"]


def split_model(
    model: nn.Module,
    num_stages: int,
    example_inputs: Mapping[str, Any],
    *,
    partitioner: str | Partitioner = "balanced",
    counts: Sequence[int] | str | None = None,
    ranks: Sequence[RankSpec] | None = None,
    blocks: Sequence[str] | None = None,
) -> SplitModel:
    """Cut a diffusion transformer into pipeline stages at block boundaries.

    Args:
        model: a transformer with weights, or without (parameters on the meta device).
        num_stages: number of stages.
        example_inputs: keyword arguments of one call of the model's forward (one microbatch). Values matter only where the
            forward looks at them (masks, lengths).
        partitioner: `"balanced"`, `"uniform"` or a function `(costs, ranks) -> Partition`. The environment variable
            VLLM_PP_LAYER_PARTITION beats it.
        counts: blocks per stage, for example `[8, 12, 12, 8]` or `"8,12,12,8"`; beats the variable.
        ranks: speed, memory and links of the rank of each stage. Default: equal ranks without limits.
        blocks: names of the model's blocks or block lists. Default: found by `find_blocks`.

    Returns:
        the stages, what crosses between them, and a callable that runs them all in this process.

    Raises:
        NotATransformerError, BlocksNotFoundError: there is nothing to cut.
        InputError: the example inputs do not fit the forward.
        CaptureError: the forward's glue cannot be recorded; names the line.
        PartitionError: the counts or the number of stages do not fit the model.
    """
    captures = CaptureCache(model, blocks, count_flops=True)
    graph = captures.get(bind(model.forward, (), example_inputs))
    partition = resolve_partition(
        partitioner, model_costs(graph, model), ranks or [RankSpec()] * num_stages, counts=counts
    )
    return SplitModel(model, captures, graph, partition)
