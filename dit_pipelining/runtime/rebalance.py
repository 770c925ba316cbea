"""Move blocks between the ranks while a pipeline is in use, to where its stages take equally long.

Between two calls of the pipeline nothing is in flight. Then the ranks exchange what their stages took per call, all come
to the same decision (see `BlockScheduler`), and if there is a better partition they move the weights, and lower the
captured graph anew. Programs of other signatures are made again when they are needed.
"""

import gc
import logging

import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.lowering.clock import StageClock
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.weights.move import check_movable, move_weights
from partitioners import BlockScheduler, Partition, Partitioner, balanced

LOGGER = logging.getLogger(__name__)


class Rebalancer:
    """Measures the stages of one transformer, and distributes its blocks anew.

    Args:
        name: of the transformer in its pipeline.
        split: as it is cut now.
        rolling: the pipeline's runtime.
        partitioner: cuts anew.

    Raises:
        ConfigError: the weights cannot be moved.
    """

    def __init__(self, name: str, split: SplitModel, rolling: Rolling, partitioner: Partitioner = balanced) -> None:
        assert split.cut is not None  # it was chosen by `plan_cut`
        check_movable(split.model)
        self.name = name
        self.rolling = rolling
        self.clock = StageClock(rolling.device)
        self.scheduler = BlockScheduler(split.cut.costs, split.cut.ranks, split.partition, partitioner=partitioner)
        self.watch(split)

    def watch(self, split: SplitModel) -> None:
        """Measure this rank's stage from now on."""
        self.split = split
        self.clock.reset()
        split.stages[self.rolling.mesh.stage].clock = self.clock

    def better_partition(self) -> Partition | None:
        """Exchange the measured times; returns a partition that is worth a move. Every rank calls this."""
        own = (self.rolling.mesh.stage, self.clock.seconds_per_call(), attention_backends(self.split.model))
        gathered: list[tuple[int, float | None, str]] = [own] * self.rolling.mesh.size
        dist.all_gather_object(gathered, own, self.rolling.control)
        times: list[float | None] = []
        for stage in range(self.split.num_stages):
            of_replicas = [seconds for index, seconds, _ in gathered if index == stage]
            valid = [seconds for seconds in of_replicas if seconds is not None]
            times.append(max(valid) if len(valid) == len(of_replicas) else None)
        return self.scheduler.collect_timing_and_rebalance(times, attention_backend=gathered[0][2])

    def move(self, partition: Partition) -> SplitModel:
        """Distribute the blocks like this; every rank calls this, while nothing is in flight."""
        before = [stage.held_weights for stage in self.split.stages]
        mesh = self.rolling.mesh
        ranks = mesh.world_ranks_of(mesh.replica)
        if mesh.world_rank == 0:
            LOGGER.info("%s: from %s to %s blocks per stage", self.name, self.split.partition, partition)
        if self.rolling.device.type == "cuda":
            torch.cuda.synchronize(self.rolling.device)  # streams still read the weights that are about to go
        split = self.split.cut_anew(
            partition,
            lambda plans: move_weights(
                self.split.model,
                before,
                [plan.weights for plan in plans],
                ranks,
                self.rolling.control,
                self.rolling.device,
            ),
        )
        self.watch(split)
        gc.collect()  # the old stages refer to each other, and to some of the weights
        return split


def attention_backends(model: nn.Module) -> str:
    """What the model's attention layers are set to use; a change of it changes what stages take."""
    processors = (getattr(module, "processor", None) for module in model.modules())
    return ",".join(sorted({str(getattr(processor, "_attention_backend", None)) for processor in processors}))
