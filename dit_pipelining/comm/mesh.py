"""Which rank plays which part: replicas of the pipeline, and stages within a replica."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Ranks laid out as replicas x stages, stages innermost: neighbours in a pipeline are neighbours in rank.

    Attributes:
        rank: of this process.
        pipeline_size: stages of each replica.
        replicas: full pipelines side by side, over which the calls of a step are spread.
    """

    rank: int
    pipeline_size: int
    replicas: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline_size * self.replicas

    @property
    def stage(self) -> int:
        """The stage this rank runs."""
        return self.rank % self.pipeline_size

    @property
    def replica(self) -> int:
        """The replica this rank belongs to."""
        return self.rank // self.pipeline_size

    def ranks_of(self, replica: int) -> list[int]:
        """The ranks of a replica, in the order of its stages."""
        first = replica * self.pipeline_size
        return list(range(first, first + self.pipeline_size))
