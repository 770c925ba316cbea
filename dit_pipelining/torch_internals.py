"""Every name of torch that is not public API and that this project uses, in one place.

Supported: torch 2.11 to 2.13. When a release moves one of these names, this is the file to mend.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

NEEDS_VALUES: tuple[type[BaseException], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What a fake tensor raises when an operation would have to look at its values."""


def new_fake_mode() -> FakeTensorMode:
    """A mode whose tensors have shapes but no data, and that mixes with real tensors (buffers, constants)."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def real_tensors() -> AbstractContextManager[Any]:
    """Inside this context tensors are real and operations run, although fake and counting modes are active."""
    return _disable_current_modes()


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two tensors exactly when they share memory (a view and its base, a tensor and its `.data`)."""
    return tensor.untyped_storage()._cdata


def version(tensor: torch.Tensor) -> int:
    """How often the tensor, or what it is a view of, was written in place. -1 where torch does not count it."""
    return -1 if tensor.is_inference() else tensor._version


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def tree_flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return pytree.tree_flatten_with_path(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    return pytree.tree_map(function, tree)


def autocast_state(device_type: str) -> tuple[str, bool, torch.dtype]:
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype among the arguments of `Module.to`."""
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype
