"""An operation's arguments come back as they were, whether they hold containers or not."""

from typing import Any

import pytest
import torch

from dit_pipelining.runtime.arguments import flatten_arguments, unflatten_arguments


@pytest.mark.parametrize(
    ("args", "kwargs", "count"),
    [
        ((1, None, "floor"), {"dtype": torch.float16}, 4),
        (([1, 2], 3), {}, 3),
        ((), {"size": (2, 3), "device": torch.device("cpu")}, 3),
        ((torch.Size([2, 3]),), {"other": {"inner": [4]}}, 3),
        ((), {}, 0),
    ],
)
def test_arguments_are_rebuilt_from_their_leaves(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None:
    leaves, structure = flatten_arguments(args, kwargs)
    assert len(leaves) == count
    again, names = unflatten_arguments(leaves, structure)
    assert (tuple(again), names) == (args, kwargs)


def test_calls_of_the_same_structure_have_the_same_key() -> None:
    keys = [flatten_arguments((torch.ones(2), number), {"alpha": 1})[1] for number in (1, 2.5)]
    assert hash(keys[0]) == hash(keys[1])
    assert keys[0] == keys[1]
    assert flatten_arguments((torch.ones(2),), {"other": 1, "alpha": 1})[1] != keys[0]
