"""The even split that vLLM uses."""

from collections.abc import Sequence

from partitioners.costs import ModelCosts, RankSpec
from partitioners.partition import Partition, check_stages


def uniform(costs: ModelCosts, ranks: Sequence[RankSpec]) -> Partition:
    """As many blocks for every stage; the remainder goes one each to the stages before the last, backwards.

    This is the rule of vLLM's `get_pp_indices` (`vllm/distributed/utils.py`): the last stage, which also runs the
    epilogue, never gets an extra block, and the first stage is the last to get one. 30 blocks over 4 stages are
    7,8,8,7.

    Args:
        costs: Only the number of blocks is read.
        ranks: Only their number is read.

    Raises:
        TooManyStagesError: If there are more ranks than blocks.
        PartitionError: If there are no ranks.
    """
    check_stages(costs, ranks)
    base, remainder = divmod(costs.num_blocks, len(ranks))
    counts = [base] * len(ranks)
    for stages_from_end in range(2, remainder + 2):
        counts[-stages_from_end] += 1
    return Partition(tuple(counts))
