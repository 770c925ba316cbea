"""What can be wrong with a partition, each kind saying what to change.

Every class keeps its constructor arguments in `args` and builds its sentence in `__str__`, so that an error survives
pickling on its way from one rank to another.
"""

from collections.abc import Mapping, Sequence

ARGUMENT = "the argument"
"""Where block counts came from, when the caller passed them."""


def counted(number: int, noun: str) -> str:
    """For example `1 stage` or `2 stages`."""
    return f"{number} {noun}{'s' * (number != 1)}"


class PartitionError(ValueError):
    """A model cannot be cut the way it was asked for."""


class InvalidCostError(PartitionError):
    """A number in `BlockCost`, `ModelCosts` or `RankSpec` makes no sense.

    Args:
        field: The field's name, such as `"BlockCost.seconds"`.
        value: What it was.
        expected: What it should have been.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(field, value, expected)
        self.field = field
        self.value = value
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.field} is {self.value!r}; give {self.expected}"


class TooManyStagesError(PartitionError):
    """There are more stages than blocks."""

    def __init__(self, num_stages: int, num_blocks: int) -> None:
        super().__init__(num_stages, num_blocks)
        self.num_stages = num_stages
        self.num_blocks = num_blocks

    def __str__(self) -> str:
        return (
            f"{self.num_stages} stages are more than the model's {counted(self.num_blocks, 'block')}; use at most "
            f"{counted(self.num_blocks, 'stage')}, or give explicit counts with a 0 for each stage that shall stay empty"
        )


class UnknownPartitionerError(PartitionError):
    """No partitioner has this name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name, known)
        self.name = name
        self.known = tuple(known)

    def __str__(self) -> str:
        known = ", ".join(repr(name) for name in self.known)
        return (
            f"there is no partitioner {self.name!r}; use one of {known}, or pass a function (costs, ranks) -> Partition"
        )


class NotAPartitionError(PartitionError):
    """A partitioner returned something else than a `Partition`."""

    def __init__(self, source: str, returned: object) -> None:
        super().__init__(source, returned)
        self.source = source
        self.returned = returned

    def __str__(self) -> str:
        return f"{self.source} returned {self.returned!r}; return a Partition, such as Partition((8, 12, 12, 8))"


class CountsError(PartitionError):
    """Block counts per stage are wrong.

    Attributes:
        counts: The counts as they were given.
        source: Where they came from: `ARGUMENT` or the environment variable's name.
    """

    def __init__(self, counts: object, source: str, *details: object) -> None:
        super().__init__(counts, source, *details)
        self.counts = counts
        self.source = source

    def _given(self) -> str:
        counts = self.counts
        text = ",".join(str(count) for count in counts) if isinstance(counts, tuple | list) else str(counts)
        return f"block counts {text!r} from {self.source}"


class NoCountsError(CountsError):
    """There are none."""

    def __str__(self) -> str:
        return f"no block counts from {self.source}; expected one integer per stage, such as 8,12,12,8"


class CountsNotIntegersError(CountsError):
    """One of the counts is not an integer."""

    def __init__(self, counts: object, source: str, value: object) -> None:
        super().__init__(counts, source, value)
        self.value = value

    def __str__(self) -> str:
        return (
            f"{self._given()}: {self.value!r} is not an integer; expected one integer per stage, "
            "separated by commas, such as 8,12,12,8"
        )


class NegativeCountError(CountsError):
    """One of the counts is below zero."""

    def __init__(self, counts: object, source: str, value: int) -> None:
        super().__init__(counts, source, value)
        self.value = value

    def __str__(self) -> str:
        return f"{self._given()}: {self.value} is negative; expected counts of 0 or more (0 leaves a stage empty)"


class EmptyStageError(CountsError):
    """A stage has no blocks, and nobody asked for that."""

    def __init__(self, counts: object, source: str, stage: int) -> None:
        super().__init__(counts, source, stage)
        self.stage = stage

    def __str__(self) -> str:
        return (
            f"{self._given()}: stage {self.stage} has no blocks; expected 1 or more for every stage, "
            "or allow_empty=True if the stage shall stay empty"
        )


class WrongNumberOfCountsError(CountsError):
    """There are not as many counts as stages."""

    def __init__(self, counts: Sequence[int], source: str, num_stages: int) -> None:
        super().__init__(counts, source, num_stages)
        self.num_counts = len(counts)
        self.num_stages = num_stages

    def __str__(self) -> str:
        return f"{self._given()}: there are {self.num_counts} of them; expected {self.num_stages}, one per stage"


class WrongSumError(CountsError):
    """The counts do not sum to the model's number of blocks."""

    def __init__(self, counts: Sequence[int], source: str, num_blocks: int) -> None:
        super().__init__(counts, source, num_blocks)
        self.total = sum(counts)
        self.num_blocks = num_blocks

    def __str__(self) -> str:
        return f"{self._given()}: they sum to {self.total}; expected {self.num_blocks}, the model's number of blocks"


class DoesNotFitError(PartitionError):
    """No placement fits into the ranks' memory.

    Args:
        counts: Blocks per stage in the placement whose largest shortfall is smallest.
        shortfalls: Bytes that each rank lacks in that placement; 0 for a rank that has enough.
        smallest_num_ranks: With how many ranks the model fits, if those that are added are like the largest of these.
            None where no number of them is enough.
        owners: The rank of each component in that placement, where components were placed.
    """

    def __init__(
        self,
        counts: Sequence[int],
        shortfalls: Sequence[int],
        smallest_num_ranks: int | None,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(counts, shortfalls, smallest_num_ranks, owners)
        self.owners = dict(owners or {})
        self.counts = tuple(counts)
        self.shortfalls = tuple(shortfalls)
        self.smallest_num_ranks = smallest_num_ranks

    def __str__(self) -> str:
        lacking = ", ".join(
            f"rank {rank} lacks {shortfall} bytes ({shortfall / 2**30:.2f} GiB)"
            for rank, shortfall in enumerate(self.shortfalls)
            if shortfall > 0
        )
        if self.smallest_num_ranks is None:
            advice = "give these ranks more memory, or make the model smaller (a smaller dtype, quantised weights)"
        else:
            advice = (
                f"use at least {counted(self.smallest_num_ranks, 'rank')}, those that are added like the largest of these, "
                "or ranks with more memory"
            )
        placement = "blocks per stage " + ",".join(str(count) for count in self.counts)
        placement += "".join(f", {name} on rank {rank}" for name, rank in self.owners.items())
        return f"the model does not fit; at best ({placement}) {lacking}; {advice}"
