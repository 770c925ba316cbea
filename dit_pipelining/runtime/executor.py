"""One transformer of a pipeline, spread over the ranks: its calls run stage by stage and return on every rank."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.capture.graph import BlockGraph, CaptureCache
from dit_pipelining.capture.signature import CallInputs
from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.model_costs import model_costs
from dit_pipelining.lowering.boundary import StagePlan
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.microbatches import cut, merge
from dit_pipelining.runtime.schedules import GPipe
from partitioners import RankSpec, TooManyStagesError, WrongNumberOfCountsError, parse_counts, resolve_partition
from partitioners.errors import ARGUMENT
from partitioners.explicit import ENVIRONMENT

FillStage = Callable[[StagePlan], None]
"""Gives the model the weights of one stage, and takes away all others."""


class TransformerExecutor:
    """Runs the calls of one transformer.

    The split waits for the first call, because where to cut depends on the shapes that come; then this rank's weights are
    loaded. What can be wrong without knowing the shapes is checked at once.

    Args:
        name: of the component in its pipeline, for messages and for `ParallelConfig.partition`.
        model: the transformer.
        forward: its own bound forward.
        config: degrees and partitioner.
        rank: of this process in the pipeline: its stage.
        device: where the stage runs.
        fill_stage: called once with this rank's stage plan.

    Raises:
        BlocksNotFoundError, PartitionError: the transformer cannot be cut as asked.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        forward: Callable[..., Any],
        config: ParallelConfig,
        rank: int,
        device: torch.device,
        fill_stage: FillStage,
    ) -> None:
        self.name = name
        self.model = model
        self.config = config
        self.rank = rank
        self.device = device
        self.split: SplitModel | None = None
        self.counts = check_counts(config, name, model)
        self._captures = CaptureCache(model, config.blocks, forward, count_flops=True)
        self._fill_stage = fill_stage
        self._gpipe: GPipe | None = None

    def __call__(self, kwargs: Mapping[str, Any]) -> Any:
        """Run one call of the forward; returns on every rank what the unsplit transformer returns."""
        split = self.split or self._split(kwargs)
        parts = cut(kwargs, split.graph.main_input, self.config.microbatches)
        calls = [split.resolve(part) for part in parts]
        outputs: list[Any] = []
        for _, group in groupby(calls, key=lambda call: id(call[0])):
            outputs += self._run(list(group))
        return merge(outputs)

    def _run(self, calls: Sequence[tuple[BlockGraph, CallInputs]]) -> list[Any]:
        assert self._gpipe is not None  # made with the split
        graph = calls[0][0]
        tensors = self._gpipe.run(graph, [inputs.leaves for _, inputs in calls])
        return [graph.rebuild_output(own, inputs) for own, (_, inputs) in zip(tensors, calls, strict=True)]

    def _split(self, kwargs: Mapping[str, Any]) -> SplitModel:
        graph = self._captures.get(kwargs)
        ranks = [RankSpec()] * self.config.pipeline_parallel_size
        costs = model_costs(graph, self.model)
        partition = resolve_partition(self.config.partitioner, costs, ranks, counts=self.counts, environment={})
        self.split = SplitModel(
            self.model, self._captures, graph, partition, lambda plans: self._fill_stage(plans[self.rank])
        )
        self._gpipe = GPipe(self.split.stages[self.rank], self.device)
        return self.split


def check_counts(config: ParallelConfig, name: str, model: nn.Module) -> Sequence[int] | None:
    """Check what can be said about a partition before the shapes are known; returns explicit counts.

    Raises:
        BlocksNotFoundError, PartitionError: the transformer cannot be cut as asked.
    """
    stages = config.pipeline_parallel_size
    blocks = len(find_blocks(model, config.blocks))
    counts = config.counts_for(name)
    if isinstance(counts, str):
        counts = parse_counts(counts)
    if counts is None and stages > blocks:
        raise TooManyStagesError(stages, blocks)
    if counts is not None and len(counts) != stages:
        source = ENVIRONMENT if config.partition is None else ARGUMENT
        raise WrongNumberOfCountsError(tuple(counts), source, stages)
    return counts
