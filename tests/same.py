"""Bitwise comparison of nested results, cache objects included."""

from typing import Any

import torch

from dit_pipelining.capture.signature import object_parts
from dit_pipelining.torch_internals import tree_flatten


def assert_same(actual: Any, expected: Any) -> None:
    """Equal structure, types and bits; objects are compared by what is in them."""
    actual_leaves, actual_spec = tree_flatten(actual)
    expected_leaves, expected_spec = tree_flatten(expected)
    assert actual_spec == expected_spec
    for one, other in zip(actual_leaves, expected_leaves, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), f"{tuple(one.shape)}: largest difference {(one - other).abs().max()}"
        elif one is not other:
            _assert_same_object(one, other)


def _assert_same_object(one: Any, other: Any) -> None:
    parts, expected = list(object_parts(one)), list(object_parts(other))
    if not parts:
        assert one == other
    assert [steps for steps, _ in parts] == [steps for steps, _ in expected]
    for (steps, part), (_, wanted) in zip(parts, expected, strict=True):
        assert not isinstance(part, torch.Tensor) or torch.equal(part, wanted), steps
