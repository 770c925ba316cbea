"""The ways to spread a pipeline over a number of GPUs, and which of them a model cannot be spread by."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from dit_pipelining.comm.layout import Layout
from dit_pipelining.config import DIMENSIONS, ParallelConfig
from partitioners.errors import counted

GOALS = ("latency", "throughput", "memory")
"""What a search can look for: seconds of one request, requests per hour, bytes of the fullest rank."""


@dataclass(frozen=True)
class Degrees(Layout):
    """Ranks along each dimension, and what is divided among some of them.

    Attributes:
        shards: `hsdp_shard_size`; 1: without HSDP.
        tiles: `vae_patch_parallel_size`.
        uneven: whether tokens do not divide by the ranks that share them.
    """

    shards: int = 1
    tiles: int = 1
    uneven: bool = False

    @classmethod
    def of(cls, config: ParallelConfig) -> "Degrees":
        """Those of a configuration."""
        sizes = {dimension: getattr(config, field) for dimension, field in DIMENSIONS.items()}
        return cls(**sizes, shards=config.hsdp_shard_size or 1, tiles=config.vae_patch_parallel_size)

    def config(self) -> ParallelConfig:
        """A configuration that has them."""
        fields: dict[str, Any] = {field: getattr(self, dimension) for dimension, field in DIMENSIONS.items()}
        if self.shards > 1:
            fields |= {"use_hsdp": True, "hsdp_shard_size": self.shards}
        return ParallelConfig(**fields, vae_patch_parallel_size=self.tiles)

    def flags(self) -> str:
        """As flags of the recipes; a dimension of one rank is left out."""
        given = [f"{FLAGS[own.name]} {value}" for own in fields(self) if (value := getattr(self, own.name)) > 1]
        given += ["--ulysses-mode anything"] * self.uneven
        return " ".join(given) or "one GPU"

    def __str__(self) -> str:
        return (
            " x ".join(f"{own.name}{value}" for own in fields(self) if (value := getattr(self, own.name)) > 1) or "one"
        )


ALONE = Degrees()
"""No rank shares anything with others."""


@dataclass(frozen=True)
class Divides:
    """By what a model can be divided inside a stage.

    Attributes:
        heads: of its attention, which Ulysses exchanges; None: its tokens cannot be split.
        tensor_sizes: over how many ranks its blocks can be cut.
        tokens: of the hidden states; None: not known.
        refusals: why it cannot be, by dimension, where it cannot: `"sequence"`, `"tensor"`.
    """

    heads: int | None = None
    tensor_sizes: tuple[int, ...] = (1,)
    tokens: int | None = None
    refusals: tuple[tuple[str, str], ...] = ()


FLAGS = {
    **{dimension: f"--{size.replace('_', '-')}" for dimension, size in DIMENSIONS.items()},
    "shards": "--use-hsdp --hsdp-shard-size",
    "tiles": "--vae-patch-parallel-size",
}
"""Of the recipes, for each of `Degrees`."""


def every_way(gpus: int) -> Iterator[Degrees]:
    """All degrees whose product is this number of GPUs.

    HSDP shards over all ranks of a copy that hold the same weights, those of cfg and sequence parallelism; it and tensor
    parallelism exclude each other.
    """
    for split in _factorisations(gpus, len(DIMENSIONS)):
        plain = Degrees(**dict(zip(DIMENSIONS, split, strict=True)))  # type: ignore[arg-type]
        yield plain
        same = plain.cfg * plain.sequence
        if same > 1 and plain.tensor == 1:
            yield replace(plain, shards=same)


def problem_of(degrees: Degrees, *, divides: Divides, blocks: int, calls: int) -> str:
    """Why a model cannot be spread like this, or why it would gain nothing; empty: it can.

    Args:
        degrees: the way.
        divides: by what the model can be divided.
        blocks: calls of blocks of its main chain.
        calls: of the transformer per step, with guidance cut into its branches.
    """
    if problem := problem_inside(degrees, divides):
        return problem
    if degrees.pipeline > blocks:
        return f"{degrees.pipeline} stages are more than {counted(blocks, 'block')}"
    if degrees.cfg > calls:
        return f"{degrees.cfg} replicas have {calls} call(s) a step to share"
    return ""


def problem_inside(degrees: Degrees, divides: Divides) -> str:
    """Why the blocks of a model cannot be shared like this inside a stage; empty: they can."""
    refusals = dict(divides.refusals)
    if degrees.sequence > 1 and "sequence" in refusals:
        return refusals["sequence"]
    if degrees.tensor > 1 and "tensor" in refusals:
        return refusals["tensor"]
    if degrees.tensor not in divides.tensor_sizes:
        return f"tensor = {degrees.tensor} is none of {', '.join(map(str, divides.tensor_sizes))}, by which its blocks divide"
    divided = degrees.ulysses * degrees.tensor
    if degrees.ulysses > 1 and (divides.heads is None or divides.heads % divided):
        return f"{divides.heads} heads do not divide by ulysses x tensor = {divided}"
    return ""


def _factorisations(product: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in _factorisations(product // first, parts - 1):
                yield (first, *rest)
