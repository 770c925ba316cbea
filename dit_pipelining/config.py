"""ParallelConfig: how to spread a pipeline over ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dit_pipelining.errors import ConfigError, WorldSizeError
from partitioners import Partitioner
from partitioners.explicit import counts_from_environment


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How to spread a pipeline over ranks.

    Args:
        pipeline_parallel_size: number of pipeline stages that each transformer is cut into.
        partitioner: where to cut: `"balanced"` (by FLOPs), `"uniform"`, or a function.
        partition: blocks per stage, for example `"8,12,12,8"`, for every transformer; or by component, for example
            `{"transformer": "8,12,12,8", "transformer_2": "10,10,10,10"}`. Beats VLLM_PP_LAYER_PARTITION, which beats
            `partitioner`.
        blocks: names of the transformer's blocks or block lists, where they are not found by themselves.
        microbatches: into how many parts a batch is cut along the pipeline, so that stages work at the same time. 1
            keeps the batch whole and every bit of the result; kernels can round a smaller batch differently.
        timeout_seconds: how long a rank waits for another before the run ends with an error.

    Raises:
        ConfigError: a value cannot be used; says which and why.
    """

    pipeline_parallel_size: int = 1
    partitioner: str | Partitioner = "balanced"
    partition: str | Sequence[int] | Mapping[str, str | Sequence[int]] | None = None
    blocks: Sequence[str] | None = None
    microbatches: int = 1
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("pipeline_parallel_size", "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected an integer of at least 1.")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds={self.timeout_seconds!r}: expected a number above 0.")

    def check_world_size(self, world_size: int) -> None:
        """Compare the number of launched processes with the degrees.

        Raises:
            WorldSizeError: they do not match.
        """
        if world_size != self.pipeline_parallel_size:
            raise WorldSizeError(
                f"{world_size} processes were launched, but pipeline_parallel_size={self.pipeline_parallel_size} needs "
                f"{self.pipeline_parallel_size}. Launch with `torchrun --nproc-per-node {self.pipeline_parallel_size}` or "
                f"set the size to {world_size}."
            )

    def counts_for(self, component: str) -> str | Sequence[int] | None:
        """Explicit blocks per stage of one transformer, None where a partitioner decides.

        Raises:
            CountsError: VLLM_PP_LAYER_PARTITION holds something that cannot be counts.
        """
        if isinstance(self.partition, Mapping):
            return self.partition.get(component)
        if self.partition is not None:
            return self.partition
        return counts_from_environment()
