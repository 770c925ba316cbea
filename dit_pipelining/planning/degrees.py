"""The ways to spread a pipeline over a number of GPUs, and which of them a model cannot be spread by."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

GOALS = ("latency", "throughput", "memory")
"""What a search can look for: seconds of one request, requests per hour, bytes of the fullest rank."""


@dataclass(frozen=True)
class Degrees:
    """Ranks along each dimension, as in `ParallelConfig`; `shards` is `hsdp_shard_size`, 1 without HSDP."""

    data: int = 1
    cfg: int = 1
    pipeline: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    shards: int = 1

    @property
    def gpus(self) -> int:
        return self.data * self.cfg * self.pipeline * self.ring * self.ulysses * self.tensor

    @property
    def sequence(self) -> int:
        """Ranks over which tokens are split."""
        return self.ring * self.ulysses

    def flags(self) -> str:
        """As flags of the recipes; a dimension of one rank is left out."""
        given = [f"{FLAGS[own.name]} {value}" for own in fields(self) if (value := getattr(self, own.name)) > 1]
        return " ".join(given) or "one GPU"

    def __str__(self) -> str:
        return (
            " x ".join(f"{own.name}{value}" for own in fields(self) if (value := getattr(self, own.name)) > 1) or "one"
        )


FLAGS = {
    "data": "--data-parallel-size",
    "cfg": "--cfg-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "ring": "--ring-degree",
    "ulysses": "--ulysses-degree",
    "tensor": "--tensor-parallel-size",
    "shards": "--use-hsdp --hsdp-shard-size",
}


def every_way(gpus: int) -> Iterator[Degrees]:
    """All degrees whose product is this number of GPUs.

    HSDP shards over all ranks of a copy that hold the same weights, those of cfg and sequence parallelism; it and tensor
    parallelism exclude each other.
    """
    for split in _factorisations(gpus, 6):
        plain = Degrees(*split)
        yield plain
        same = plain.cfg * plain.sequence
        if same > 1 and plain.tensor == 1:
            yield replace(plain, shards=same)


def problem_of(degrees: Degrees, *, heads: int | None, blocks: int, calls: int) -> str:
    """Why a model cannot be spread like this, or why it would gain nothing; empty: it can.

    Args:
        degrees: the way.
        heads: of the model's attention; None: not known.
        blocks: calls of blocks of its main chain.
        calls: of the transformer per step, with guidance cut into its branches.
    """
    divided = degrees.ulysses * degrees.tensor
    if divided > 1 and heads is None:
        return "the number of attention heads is not known"
    if heads is not None and heads % divided:
        return f"{heads} heads do not divide by ulysses x tensor = {divided}"
    if degrees.pipeline > blocks:
        return f"{blocks} blocks are fewer than {degrees.pipeline} stages"
    if degrees.cfg > calls:
        return f"{degrees.cfg} replicas have {calls} call(s) a step to share"
    return ""


def _factorisations(product: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in _factorisations(product // first, parts - 1):
                yield (first, *rest)
