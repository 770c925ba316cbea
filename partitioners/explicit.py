"""Block counts that somebody wrote down: an argument, or vLLM's environment variable."""

import os
import re
from collections.abc import Mapping, Sequence

from partitioners.costs import ModelCosts, RankSpec
from partitioners.errors import ARGUMENT, CountsNotIntegersError
from partitioners.partition import Partition, Partitioner, check_counts

ENVIRONMENT_VARIABLE = "VLLM_PP_LAYER_PARTITION"
"""vLLM's name for the number of layers of each pipeline stage (`vllm/envs.py`), such as `8,12,12,8`."""

ENVIRONMENT = f"the environment variable {ENVIRONMENT_VARIABLE}"
"""Where block counts came from, when the environment had them."""


def explicit(counts: Sequence[int] | str, *, source: str = ARGUMENT) -> Partitioner:
    """A partitioner that gives every stage the number of blocks that `counts` says; 0 leaves a stage empty.

    Args:
        counts: Blocks of each stage, or text as `parse_counts` reads it.
        source: Where they came from, for the errors' sentences.

    Raises:
        CountsNotIntegersError: If a count is not an integer.
        NegativeCountError: If a count is negative (vLLM lets that pass).
        NoCountsError: If there are no counts.

    The partitioner raises `WrongNumberOfCountsError` unless there are as many counts as ranks, and `WrongSumError`
    unless they sum to the number of blocks.
    """
    integers = parse_counts(counts, source=source) if isinstance(counts, str) else check_counts(counts, source=source)
    partition = Partition(integers, allow_empty=True)

    def explicit_counts(costs: ModelCosts, ranks: Sequence[RankSpec]) -> Partition:
        partition.check(costs, ranks, source=source)
        return partition

    return explicit_counts


def parse_counts(text: str, *, source: str = ARGUMENT) -> tuple[int, ...]:
    """Integers separated by commas, such as `8,12,12,8`; spaces around them do not matter.

    Raises:
        CountsNotIntegersError: If something between two commas is not an integer, or nothing is there.
        NegativeCountError: If a count is negative.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        # int() would also take 1_000 and the digits of every script.
        if not re.fullmatch(r"[+-]?[0-9]+", word):
            raise CountsNotIntegersError(text, source, word)
    return check_counts([int(word) for word in words], source=source)


def counts_from_environment(environment: Mapping[str, str] = os.environ) -> tuple[int, ...] | None:
    """The block counts in VLLM_PP_LAYER_PARTITION, or None where it is not set.

    Raises:
        CountsNotIntegersError: If it is set to something else than integers separated by commas; also if it is empty.
        NegativeCountError: If a count is negative.
    """
    text = environment.get(ENVIRONMENT_VARIABLE)
    return None if text is None else parse_counts(text, source=ENVIRONMENT)
