"""Which rank plays which part."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.comm.layout import CALLERS, LINE, Layout
from dit_pipelining.config import DIMENSIONS, ParallelConfig


@dataclass(frozen=True)
class Mesh:
    """A line of ranks as replicas x stages, stages innermost: neighbours in a pipeline are neighbours in rank.

    Attributes:
        rank: of this process within the line.
        pipeline_size: stages of each replica.
        replicas: full pipelines side by side, over which the calls of a step are spread.
        layout: of the launch. Default: the line is all of it.
        world_rank: of this process in the launch.
    """

    rank: int
    pipeline_size: int
    replicas: int = 1
    layout: Layout = field(default=Layout(), repr=False)
    world_rank: int = -1

    @classmethod
    def of(cls, layout: Layout, rank: int) -> "Mesh":
        """The line of a rank of the launch."""
        return cls(layout.peers(rank, *LINE).index(rank), layout.pipeline, layout.cfg, layout, rank)

    def __post_init__(self) -> None:
        if self.world_rank < 0:
            object.__setattr__(self, "layout", Layout(cfg=self.replicas, pipeline=self.pipeline_size))
            object.__setattr__(self, "world_rank", self.rank)

    @property
    def size(self) -> int:
        """Ranks of the line."""
        return self.pipeline_size * self.replicas

    @property
    def stage(self) -> int:
        """The stage this rank runs."""
        return self.rank % self.pipeline_size

    @property
    def replica(self) -> int:
        """The replica this rank belongs to."""
        return self.rank // self.pipeline_size

    @property
    def line(self) -> tuple[int, ...]:
        """The rank in the launch of each rank of the line."""
        return self.layout.peers(self.world_rank, *LINE)

    @property
    def copies(self) -> tuple[int, ...]:
        """The ranks in the launch that have this place in each data-parallel copy."""
        return self.layout.peers(self.world_rank, "data")

    @property
    def callers(self) -> tuple[int, ...]:
        """The ranks in the launch that make the same calls: those of all lines of this data-parallel copy."""
        return self.layout.peers(self.world_rank, *CALLERS)

    def ranks_of(self, replica: int) -> list[int]:
        """The ranks of a replica within the line, in the order of its stages."""
        first = replica * self.pipeline_size
        return list(range(first, first + self.pipeline_size))

    def world_ranks_of(self, replica: int) -> list[int]:
        """The ranks of a replica in the launch, in the order of its stages."""
        return [self.line[rank] for rank in self.ranks_of(replica)]

    def in_all_lines(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """What these ranks of the line are in the launch, in each of its lines; for `new_group`."""
        return [tuple(line[rank] for rank in ranks) for line in self.layout.groups(*LINE)]


def layout_of(config: ParallelConfig) -> Layout:
    """How a configuration lays out the ranks."""
    return Layout(**{dimension: getattr(config, size) for dimension, size in DIMENSIONS.items()})


def new_group(
    alike: Sequence[Sequence[int]], timeout: timedelta, backend: str = "gloo", options: Any = None
) -> dist.ProcessGroup:
    """Make a process group of each of these sets of ranks of the launch; returns the one that this rank is in.

    All ranks of the launch call this alike, also those that are in none: torch names groups by how many a rank has made.
    """
    made = [dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options) for ranks in alike]
    own = next((group for group, ranks in zip(made, alike, strict=True) if dist.get_rank() in ranks), made[0])
    return own


def backend_of(device: torch.device) -> str:
    """Of groups for collectives of tensors on such devices: NCCL between GPUs, gloo between CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


def line_group(mesh: Mesh, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks of the line; made as `new_group` makes it."""
    return new_group(mesh.in_all_lines(range(mesh.size)), timeout)
