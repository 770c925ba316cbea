"""Which rank plays which part.

The ranks of a launch are laid out as data x cfg x pipeline x ring x ulysses x tensor, the dimension that talks most
innermost, so that its ranks are neighbours. Ranks that differ in cfg and pipeline only are a line: they run a pipeline's
calls together, stage by stage, in one replica or several. Lines do not know of each other: those of other ring, ulysses and
tensor ranks make the same calls and meet inside the transformer, those of other data ranks have other requests.
"""

from dataclasses import dataclass, field, fields
from datetime import timedelta
from itertools import product
from typing import Any

import torch.distributed as dist

from dit_pipelining.config import ParallelConfig


@dataclass(frozen=True)
class Mesh:
    """A line of ranks as replicas x stages, stages innermost: neighbours in a pipeline are neighbours in rank.

    Attributes:
        rank: of this process within the line.
        pipeline_size: stages of each replica.
        replicas: full pipelines side by side, over which the calls of a step are spread.
        line: the rank in the launch of each rank of the line. Default: the line is the whole launch.
        copies: the ranks in the launch that have this place in each data-parallel copy. Default: there is one copy.
    """

    rank: int
    pipeline_size: int
    replicas: int = 1
    line: tuple[int, ...] = field(default=(), repr=False)
    copies: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.line:
            object.__setattr__(self, "line", tuple(range(self.size)))
        if not self.copies:
            object.__setattr__(self, "copies", (self.world_rank,))

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
    def world_rank(self) -> int:
        """This rank in the launch."""
        return self.line[self.rank]

    def ranks_of(self, replica: int) -> list[int]:
        """The ranks of a replica within the line, in the order of its stages."""
        first = replica * self.pipeline_size
        return list(range(first, first + self.pipeline_size))

    def world_ranks_of(self, replica: int) -> list[int]:
        """The ranks of a replica in the launch, in the order of its stages."""
        return [self.line[rank] for rank in self.ranks_of(replica)]


@dataclass(frozen=True)
class Layout:
    """How many ranks there are of each dimension, outermost first."""

    data: int = 1
    cfg: int = 1
    pipeline: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place along each dimension."""
        places = {}
        for own in reversed(fields(self)):
            rank, places[own.name] = divmod(rank, getattr(self, own.name))
        return dict(reversed(places.items()))

    def peers(self, rank: int, *dimensions: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along these dimensions only, itself among them, in order."""
        place = self.coordinates(rank)
        ranges = [range(getattr(self, name)) if name in dimensions else [at] for name, at in place.items()]
        return tuple(self._rank(at) for at in product(*ranges))

    def mesh(self, rank: int) -> Mesh:
        """The line of a rank."""
        line = self.peers(rank, "cfg", "pipeline")
        return Mesh(line.index(rank), self.pipeline, self.cfg, line, self.peers(rank, "data"))

    def _rank(self, places: tuple[int, ...]) -> int:
        rank = 0
        for own, place in zip(fields(self), places, strict=True):
            rank = rank * getattr(self, own.name) + place
        return rank


def layout_of(config: ParallelConfig) -> Layout:
    """How a configuration lays out the ranks."""
    return Layout(
        data=config.data_parallel_size,
        cfg=config.cfg_parallel_size,
        pipeline=config.pipeline_parallel_size,
        ring=config.ring_degree,
        ulysses=config.ulysses_degree,
        tensor=config.tensor_parallel_size,
    )


def new_group(
    ranks: "list[int] | tuple[int, ...]", timeout: timedelta, backend: str = "gloo", options: Any = None
) -> dist.ProcessGroup:
    """A process group of these ranks of the launch. They all make it at the same point; other ranks need not."""
    return dist.new_group(
        list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
    )
