"""Where to cut a transformer into pipeline stages.

A partitioner is a function `(costs, ranks) -> Partition`. This package is pure Python: it imports no torch and nothing
of dit_pipelining, so a split can be planned on any machine.
"""

import os
from collections.abc import Mapping, Sequence

from partitioners.balanced import balanced
from partitioners.costs import BlockCost, Component, ModelCosts, RankSpec
from partitioners.errors import (
    CountsError,
    CountsNotIntegersError,
    DoesNotFitError,
    EmptyStageError,
    InvalidCostError,
    NegativeCountError,
    NoCountsError,
    NotAPartitionError,
    PartitionError,
    TooManyStagesError,
    UnknownPartitionerError,
    WrongNumberOfCountsError,
    WrongSumError,
)
from partitioners.explicit import ENVIRONMENT, ENVIRONMENT_VARIABLE, counts_from_environment, explicit, parse_counts
from partitioners.partition import Partition, Partitioner
from partitioners.rebalance import BlockScheduler
from partitioners.uniform import uniform
from partitioners.vae_aware import (
    Placement,
    compute_balanced_block_split,
    default_owners,
    place,
    vae_aware,
    with_components,
)

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "PARTITIONERS",
    "BlockCost",
    "BlockScheduler",
    "Component",
    "CountsError",
    "CountsNotIntegersError",
    "DoesNotFitError",
    "EmptyStageError",
    "InvalidCostError",
    "ModelCosts",
    "NegativeCountError",
    "NoCountsError",
    "NotAPartitionError",
    "Partition",
    "PartitionError",
    "Partitioner",
    "Placement",
    "RankSpec",
    "TooManyStagesError",
    "UnknownPartitionerError",
    "WrongNumberOfCountsError",
    "WrongSumError",
    "balanced",
    "compute_balanced_block_split",
    "counts_from_environment",
    "default_owners",
    "explicit",
    "parse_counts",
    "place",
    "resolve_partition",
    "uniform",
    "vae_aware",
    "with_components",
]

PARTITIONERS: dict[str, Partitioner] = {"uniform": uniform, "balanced": balanced, "vae-aware": vae_aware}
"""The partitioners that have a name."""


def resolve_partition(
    partitioner: str | Partitioner,
    costs: ModelCosts,
    ranks: Sequence[RankSpec],
    counts: Sequence[int] | str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Partition:
    """Where to cut, by whoever has the first say: `counts`, then VLLM_PP_LAYER_PARTITION, then `partitioner`.

    Args:
        partitioner: A name in `PARTITIONERS`, or a function.
        costs: The model.
        ranks: One entry per stage, in pipeline order.
        counts: Blocks of each stage, where the caller wants to decide; see `explicit`.
        environment: Where to look for VLLM_PP_LAYER_PARTITION.

    Raises:
        UnknownPartitionerError: If there is no such name, even where something else decides.
        CountsError: If explicit counts do not match the model and the ranks, or a custom partitioner's do not.
        NotAPartitionError: If a custom partitioner returns something else than a Partition.
        PartitionError: What the partitioner raises.
    """
    if isinstance(partitioner, str):
        if partitioner not in PARTITIONERS:
            raise UnknownPartitionerError(partitioner, tuple(PARTITIONERS))
        decide, source = PARTITIONERS[partitioner], f"the partitioner {partitioner!r}"
    else:
        decide, source = partitioner, f"the partitioner {getattr(partitioner, '__name__', partitioner)!r}"
    if counts is not None:
        decide = explicit(counts)
    elif (from_environment := counts_from_environment(environment)) is not None:
        decide = explicit(from_environment, source=ENVIRONMENT)
    partition = decide(costs, ranks)
    if not isinstance(partition, Partition):
        raise NotAPartitionError(source, partition)
    partition.check(costs, ranks, source=source)
    return partition
