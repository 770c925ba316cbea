"""Checks of the fields of a ParallelConfig that need more than a line."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dit_pipelining.errors import ConfigError
from partitioners import PARTITIONERS, WrongNumberOfCountsError, counts_from_environment, parse_counts
from partitioners.errors import ARGUMENT
from partitioners.explicit import ENVIRONMENT
from partitioners.partition import check_counts

LAUNCH_RUN = "launch-"
"""How the ids of runs begin that `launch` starts in torchrun's place."""

_MOVES = "blocks are moved by what one pipeline measures, but here several must move alike"
CONTRADICTIONS: Mapping[str, Mapping[str, str]] = {
    "use_hsdp": {
        "tensor_parallel_size": "tensor-parallel ranks hold a part of each weight for good, and have nothing in common to "
        "shard",
        "compile": "a compiled block does not see its weights come and go",
        "rebalance": "blocks are moved as whole weights, which no rank holds",
        "schedule": "torch's schedule runs one pipeline's calls, and replicas that share weights have to take part in them",
    },
    "sequence_parallel_size": {
        "rebalance": _MOVES,
        "compile": "a compiled block does not see the exchange of heads and tokens within attention",
    },
    "tensor_parallel_size": {"rebalance": _MOVES},
    "cfg_parallel_size": {"schedule": "torch's schedule runs one pipeline"},
}
"""What does not go together, and why; `sequence_parallel_size` stands for ulysses_degree and ring_degree."""


def check_contradictions(config: Any) -> None:
    """Check that no two settings of a ParallelConfig that differ from their defaults exclude each other.

    Raises:
        ConfigError: two do; says why.
    """
    for name, others in CONTRADICTIONS.items():
        fields = ("ulysses_degree", "ring_degree") if name == "sequence_parallel_size" else (name,)
        used = [field for field in fields if getattr(config, field) != getattr(type(config), field)]
        for other, reason in others.items() if used else ():
            if (value := getattr(config, other)) != getattr(type(config), other):
                given = f"{used[0]}={getattr(config, used[0])!r}"
                raise ConfigError(f"{given} and {other}={value!r}: {reason}. Leave one of them out.")


@dataclass(frozen=True)
class HsdpSizes:
    """What `use_hsdp` comes to, as fields of a ParallelConfig."""

    hsdp_shard_size: int
    hsdp_replicate_size: int
    cfg_parallel_size: int


def hsdp_sizes(config: Any) -> HsdpSizes | None:
    """Over how many ranks a ParallelConfig shards weights, and how often; None: it does not.

    Raises:
        ConfigError: the sizes cannot be, or do not fit the others.
    """
    sizes = {name: getattr(config, name) for name in ("hsdp_shard_size", "hsdp_replicate_size")}
    given = {name: size for name, size in sizes.items() if size is not None}
    for name, size in given.items():
        check_positive(name, size)
    if not config.use_hsdp:
        if given:
            name, size = next(iter(given.items()))
            raise ConfigError(f"{name}={size!r} is given, but use_hsdp is not. Set use_hsdp=True, or leave it out.")
        return None
    shard, replicate = config.hsdp_shard_size, config.hsdp_replicate_size
    holders = config.cfg_parallel_size * config.sequence_parallel_size
    makes_replicas = holders == 1
    if makes_replicas:
        if shard is None:
            raise ConfigError(
                "use_hsdp=True needs ranks that hold the same stage, which cfg_parallel_size, ulysses_degree and ring_degree "
                "make; without them give hsdp_shard_size, the number of ranks to shard the weights over."
            )
        holders = shard * (replicate or 1)
    shard = shard or max(holders // (replicate or 1), 1)
    replicate = replicate or max(holders // shard, 1)
    if shard * replicate != holders:
        raise ConfigError(
            f"hsdp_shard_size={shard} x hsdp_replicate_size={replicate} is not {holders}, the number of ranks that hold the "
            f"same stage (cfg_parallel_size={config.cfg_parallel_size} x ring_degree={config.ring_degree} x "
            f"ulysses_degree={config.ulysses_degree})."
        )
    if shard == 1:
        raise ConfigError("hsdp_shard_size=1 shards nothing; use 2 or more, or leave use_hsdp out.")
    return HsdpSizes(shard, replicate, holders if makes_replicas else config.cfg_parallel_size)


def integer_in(environment: Mapping[str, str], name: str, default: int) -> int:
    """The integer that a variable of the launch holds; the default where it is not set.

    Raises:
        ConfigError: it holds something else.
    """
    text = environment.get(name, str(default))
    if not text.strip().isdecimal():
        raise ConfigError(
            f"the environment variable {name} is {text!r}: expected an integer, as torchrun sets it. Unset it, or launch with "
            "torchrun."
        )
    return int(text)


def command_for(processes: int) -> str:
    """How to start as many processes in the way in which this one was started."""
    by_launch = os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(LAUNCH_RUN)
    return f"launch(..., nproc={processes})" if by_launch else f"torchrun --nproc-per-node {processes}"


def check_positive(name: str, value: object) -> None:
    """Check a number of something.

    Raises:
        ConfigError: it is no integer of at least 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}: expected an integer of at least 1.")


def check_partitioner(partitioner: object) -> None:
    """Check that this is a partitioner's name or could be a partitioner.

    Raises:
        ConfigError: it is neither.
    """
    known = partitioner in PARTITIONERS if isinstance(partitioner, str) else callable(partitioner)
    if not known:
        raise ConfigError(
            f"partitioner={partitioner!r}: expected one of {', '.join(map(repr, PARTITIONERS))}, or a function "
            "(costs, ranks) -> Partition."
        )


def early_counts_check(counts: object, num_stages: int, told: str = "partition") -> bool:
    """Check explicit counts, or where there are none those of VLLM_PP_LAYER_PARTITION, before the model is known.

    Args:
        counts: blocks per stage.
        num_stages: the number of stages.
        told: what to call the setting in an error.

    Returns:
        whether there are any.

    Raises:
        CountsError: they are not one number of blocks per stage; names their source.
        ConfigError: `counts` is neither text nor a sequence.
    """
    source, integers = ARGUMENT, None
    if counts is None:
        source, integers = ENVIRONMENT, counts_from_environment()
    elif isinstance(counts, str):
        integers = parse_counts(counts)
    elif not isinstance(counts, Sequence):
        raise ConfigError(f"{told}: expected blocks per stage, such as [8, 12, 12, 8] or '8,12,12,8'.")
    else:
        integers = check_counts(counts)
    if integers is not None and len(integers) != num_stages:
        raise WrongNumberOfCountsError(integers, source, num_stages)
    return integers is not None
