"""torch's ScheduleGPipe over the stages of a split model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.lowering.boundary import with_plain_strides
from dit_pipelining.lowering.stage import StageModule

KEPT_SCHEDULES = 4
"""Schedules with receive buffers of their own that are kept; a pipeline that changes its size again makes new ones."""


class GPipe:
    """Runs the microbatches of one call over the ranks of a pipeline, this rank being one stage.

    A `PipelineStage` keeps receive buffers of one signature per microbatch, so there is one schedule for each graph and
    number of microbatches.

    Args:
        stage: this rank's.
        device: where it runs.
        group: the pipeline's ranks, in the order of the stages; None: all ranks.
    """

    def __init__(self, stage: StageModule, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.stage = stage
        self.device = device
        self.group = group
        self.last_rank = dist.get_process_group_ranks(group)[-1]
        self._schedules: dict[tuple[int, int], tuple[_Microbatches, ScheduleGPipe]] = {}

    def run(self, graph: BlockGraph, inputs: Sequence[Mapping[str, Any]]) -> list[list[torch.Tensor]]:
        """Run microbatches of one graph.

        Args:
            graph: the captured forward; this rank's program of it has been added to the stage.
            inputs: leaves of each microbatch (`CallInputs.leaves`), the same on every rank.

        Returns:
            for each microbatch the tensors of `graph.output_nodes`, on every rank.
        """
        microbatches, schedule = self._schedule(graph, len(inputs))
        microbatches.start(inputs)
        try:
            schedule.eval(microbatch=torch.arange(len(inputs)))
            return [self._share(graph, microbatches.outputs.get(i)) for i in range(len(inputs))]
        finally:
            microbatches.start(())  # nothing of a call outlives it

    def _schedule(self, graph: BlockGraph, count: int) -> "tuple[_Microbatches, ScheduleGPipe]":
        key = (id(graph), count)
        if key not in self._schedules:
            while len(self._schedules) >= KEPT_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            microbatches = _Microbatches(self.stage, graph)
            received, sent = self.stage.wire_metadata(graph)
            torch_stage = PipelineStage(
                microbatches,
                self.stage.stage_index,
                self.stage.num_stages,
                self.device,
                input_args=received,
                output_args=sent,
                group=self.group,
            )
            self._schedules[key] = microbatches, ScheduleGPipe(torch_stage, n_microbatches=count)
        return self._schedules[key]

    def _share(self, graph: BlockGraph, outputs: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        """Broadcast the last stage's outputs to all ranks."""
        shared = []
        for i, node in enumerate(graph.output_nodes):
            if outputs is None:
                tensor = torch.empty(node.meta["shape"], dtype=node.meta["dtype"], device=self.device)
            else:
                tensor = outputs[i].contiguous()
            dist.broadcast(tensor, src=self.last_rank, group=self.group)
            shared.append(tensor)
        return shared


class _Microbatches(nn.Module):
    """A stage as torch's schedule sees it: takes what it received and the number of a microbatch.

    The schedule would cut the model's inputs along their first dimension, which not all of them have; so it cuts the
    numbers, and the inputs, cut already, are looked up here.
    """

    def __init__(self, stage: StageModule, graph: BlockGraph) -> None:
        super().__init__()
        self.stage = stage
        self.graph = graph
        self.inputs: Sequence[Mapping[str, Any]] = ()
        self.outputs: dict[int, tuple[torch.Tensor, ...]] = {}

    def start(self, inputs: Sequence[Mapping[str, Any]]) -> None:
        self.inputs = inputs
        self.outputs = {}

    def forward(self, *received: torch.Tensor, microbatch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        number = int(microbatch)
        outputs = self.stage.run(self.graph, received, self.inputs[number])
        if self.stage.stage_index == self.stage.num_stages - 1:
            self.outputs[number] = outputs
        return tuple(map(with_plain_strides, outputs))
