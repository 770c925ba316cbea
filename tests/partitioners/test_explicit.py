import pytest

from partitioners import (
    ENVIRONMENT_VARIABLE,
    CountsError,
    CountsNotIntegersError,
    ModelCosts,
    NegativeCountError,
    PartitionError,
    RankSpec,
    WrongNumberOfCountsError,
    WrongSumError,
    counts_from_environment,
    explicit,
    parse_counts,
)

COSTS = ModelCosts.uniform(40)
RANKS = [RankSpec()] * 4


def test_counts_are_used_as_given() -> None:
    assert explicit([8, 12, 12, 8])(COSTS, RANKS).counts == (8, 12, 12, 8)


def test_counts_may_be_text() -> None:
    assert explicit("8,12,12,8")(COSTS, RANKS).counts == (8, 12, 12, 8)


def test_zero_leaves_a_stage_empty() -> None:
    assert explicit([20, 0, 20, 0])(COSTS, RANKS).ranges == [(0, 20), (20, 20), (20, 40), (40, 40)]


def test_zeros_allow_more_stages_than_blocks() -> None:
    assert explicit([1, 0, 1])(ModelCosts.uniform(2), [RankSpec()] * 3).counts == (1, 0, 1)


def test_spaces_do_not_matter() -> None:
    assert parse_counts(" 8, 12 ,12,8 ") == (8, 12, 12, 8)


@pytest.mark.parametrize(
    ("text", "value"),
    [("8,x,12", "x"), ("8,,12", ""), ("8,12,", ""), ("", ""), ("8.0,12", "8.0"), ("1_0,2", "1_0"), ("8;12", "8;12")],
)
def test_text_that_is_not_integers_is_refused(text: str, value: str) -> None:
    with pytest.raises(CountsNotIntegersError, match="expected one integer per stage") as caught:
        parse_counts(text)
    assert caught.value.value == value
    assert repr(text) in str(caught.value)
    assert "from the argument" in str(caught.value)


@pytest.mark.parametrize("value", [8.0, "8", None, True])
def test_values_that_are_not_integers_are_refused(value: object) -> None:
    with pytest.raises(CountsNotIntegersError) as caught:
        explicit([value, 32])  # type: ignore[list-item]
    assert caught.value.value is value


@pytest.mark.parametrize("counts", [[-8, 24, 16, 8], "-8,24,16,8"])
def test_negative_counts_are_refused_even_where_the_sum_is_right(counts: list[int] | str) -> None:
    with pytest.raises(NegativeCountError, match=r"'-8,24,16,8' from the argument: -8 is negative"):
        explicit(counts)


def test_wrong_number_of_counts_is_refused() -> None:
    with pytest.raises(WrongNumberOfCountsError, match=r"'20,20' from the argument: there are 2 of them; expected 4"):
        explicit([20, 20])(COSTS, RANKS)


def test_wrong_sum_is_refused() -> None:
    with pytest.raises(WrongSumError, match=r"'8,12,12,9' from the argument: they sum to 41; expected 40"):
        explicit([8, 12, 12, 9])(COSTS, RANKS)


def test_no_counts_are_refused() -> None:
    with pytest.raises(PartitionError, match="no block counts"):
        explicit([])


def test_each_violation_is_a_counts_error_and_a_value_error() -> None:
    for kind in (CountsNotIntegersError, NegativeCountError, WrongNumberOfCountsError, WrongSumError):
        assert issubclass(kind, CountsError)
        assert issubclass(kind, ValueError)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "8,12,12,8")
    assert counts_from_environment() == (8, 12, 12, 8)
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION")
    assert counts_from_environment() is None


@pytest.mark.parametrize(
    ("text", "kind"), [("8,x", CountsNotIntegersError), ("", CountsNotIntegersError), ("-1,41", NegativeCountError)]
)
def test_errors_name_the_environment_variable(text: str, kind: type[CountsError]) -> None:
    with pytest.raises(kind, match="from the environment variable VLLM_PP_LAYER_PARTITION"):
        counts_from_environment({ENVIRONMENT_VARIABLE: text})
