import pytest
from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.errors import BlocksNotFoundError, NotATransformerError


class Small(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class Large(nn.Linear):
    def __init__(self) -> None:
        super().__init__(50, 50)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Small() for _ in range(2))
        self.layers = nn.ModuleList(Large() for _ in range(3))


LAYERS = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("mark", ["_no_split_modules", "_repeated_blocks"])
def test_a_class_mark_names_the_blocks_however_small_they_are(mark: str) -> None:
    class Marked(Model):
        pass

    setattr(Marked, mark, ["Small"])
    assert find_blocks(Marked()) == ["norms.0", "norms.1"]


def test_both_marks_count() -> None:
    class Marked(Model):
        _no_split_modules = ["Large"]  # noqa: RUF012
        _repeated_blocks = ["Small"]  # noqa: RUF012

    assert find_blocks(Marked()) == ["norms.0", "norms.1", *LAYERS]


def test_a_block_that_wraps_a_marked_module_is_a_block() -> None:
    class Marked(Model):
        _no_split_modules = ["Large"]  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Wrapper(Large()) for _ in range(2))

    assert find_blocks(Marked()) == ["layers.0", "layers.1"]


def test_marks_that_name_nothing_in_a_list_are_ignored() -> None:
    class Marked(Model):
        _no_split_modules = ["Absent"]  # noqa: RUF012

    assert find_blocks(Marked()) == LAYERS


def test_without_marks_the_lists_with_most_parameters_hold_the_blocks() -> None:
    assert find_blocks(Model()) == LAYERS


def test_without_marks_two_lists_of_similar_size_both_hold_blocks() -> None:
    model = Model()
    model.single = nn.ModuleList(nn.Linear(50, 20) for _ in range(2))
    assert find_blocks(model) == [*LAYERS, "single.0", "single.1"]


def test_lists_inside_a_block_are_no_block_lists() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Large() for _ in range(2))

    model = Model()
    model.layers = nn.ModuleList(Nested() for _ in range(2))
    assert find_blocks(model) == ["layers.0", "layers.1"]


def test_lists_below_other_modules_are_found() -> None:
    assert find_blocks(Wrapper(Model())) == [f"inner.{name}" for name in LAYERS]


def test_a_chosen_list_stands_for_its_members() -> None:
    assert find_blocks(Model(), ["norms"]) == ["norms.0", "norms.1"]


def test_single_blocks_can_be_chosen_and_repetitions_count_once() -> None:
    assert find_blocks(Model(), ["layers.2", "layers.0", "layers.2"]) == ["layers.2", "layers.0"]


def test_a_sequential_can_be_chosen_as_a_list() -> None:
    model = nn.Module()
    model.trunk = nn.Sequential(Large(), Large())
    assert find_blocks(model, ["trunk"]) == ["trunk.0", "trunk.1"]


def test_one_name_may_stand_without_a_list_around_it() -> None:
    assert find_blocks(Model(), "layers") == LAYERS


@pytest.mark.parametrize("name", ["layer", "layers.3", ""])
def test_an_unknown_name_is_an_error_that_lists_the_block_lists(name: str) -> None:
    with pytest.raises(BlocksNotFoundError, match=r"Model has no submodule .*norms, layers"):
        find_blocks(Model(), [name])


def test_an_unknown_name_without_a_list_around_it_is_not_taken_apart() -> None:
    with pytest.raises(BlocksNotFoundError, match=r"blocks=\['layer'\]"):
        find_blocks(Model(), "layer")


def test_a_block_inside_another_chosen_block_is_an_error() -> None:
    model = Wrapper(Model())
    with pytest.raises(BlocksNotFoundError, match=r"'inner\.layers\.1' lies inside another chosen block"):
        find_blocks(model, ["inner", "inner.layers.1"])


def test_a_model_without_lists_is_an_error_that_says_to_name_blocks() -> None:
    with pytest.raises(BlocksNotFoundError, match=r"Large has no nn.ModuleList .*blocks=\[\.\.\.\]"):
        find_blocks(Large())


def test_a_list_without_parameters_is_no_block_list() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Identity() for _ in range(2))
    with pytest.raises(BlocksNotFoundError, match=r"has no nn.ModuleList with parameters"):
        find_blocks(model)


@pytest.mark.parametrize("value", ["wan2.2", None, object()])
def test_what_is_no_module_is_an_error_that_names_its_type(value: object) -> None:
    with pytest.raises(NotATransformerError, match=type(value).__name__):
        find_blocks(value)  # type: ignore[arg-type]
