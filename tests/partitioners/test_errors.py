import pickle

import pytest

from partitioners import (
    CountsNotIntegersError,
    DoesNotFitError,
    EmptyStageError,
    InvalidCostError,
    NegativeCountError,
    NotAPartitionError,
    PartitionError,
    TooManyStagesError,
    UnknownPartitionerError,
    WrongNumberOfCountsError,
    WrongSumError,
)

ERRORS = [
    PartitionError("a sentence"),
    InvalidCostError("BlockCost.seconds", -1.0, "a finite number of 0 or more"),
    TooManyStagesError(3, 2),
    NotAPartitionError("the partitioner 'even'", [1, 2]),
    UnknownPartitionerError("even", ("uniform", "balanced")),
    CountsNotIntegersError("8,x", "the argument", "x"),
    NegativeCountError((-1, 3), "the argument", -1),
    EmptyStageError((1, 0), "the argument", 1),
    WrongNumberOfCountsError((1, 2), "the argument", 3),
    WrongSumError((1, 2), "the argument", 4),
    DoesNotFitError((1, 1), (5, 0), None),
    DoesNotFitError((1, 1), (5, 0), 3),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: PartitionError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_are_value_errors(error: PartitionError) -> None:
    assert isinstance(error, PartitionError)
    assert isinstance(error, ValueError)
