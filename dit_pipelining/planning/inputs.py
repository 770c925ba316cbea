"""Described inputs: keyword arguments of a forward written as plain data, and the tensors made from them.

A description is `{"shape": [1, 512], "dtype": "int64"}` for a tensor of zeros, with `"fill": 1` for one of ones, such as
a mask of kept tokens; `{"value": ...}` for anything that is no tensor; `{"list": [...]}`, `{"tuple": [...]}` and
`{"dict": {...}}` for containers of descriptions.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_pipelining.errors import ConfigError

if TYPE_CHECKING:
    import torch

Description = dict[str, Any]


def tensor(*shape: int, dtype: str = "bfloat16", fill: float | None = None) -> Description:
    """The description of a tensor."""
    described: Description = {"shape": list(shape), "dtype": dtype}
    return described if fill is None else {**described, "fill": fill}


def build_inputs(described: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors and values from descriptions, on the CPU.

    Raises:
        ConfigError: something is not described as this file says.
    """
    return {name: _build(name, description) for name, description in described.items()}


def with_dtype(described: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The same inputs for a model in another dtype: presets and recipes describe those of a model in bfloat16."""

    def changed(description: Any) -> Any:
        if isinstance(description, dict):
            return {
                key: dtype if key == "dtype" and value == "bfloat16" else changed(value)
                for key, value in description.items()
            }
        return [changed(item) for item in description] if isinstance(description, list) else description

    return {name: changed(description) for name, description in described.items()}


def read_inputs(file: Path) -> dict[str, Any]:
    """Descriptions from a JSON file: an object with one entry per keyword argument.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the inputs file {file} cannot be read: {error}.") from None
    if not isinstance(described, dict):
        raise ConfigError(f"the inputs file {file} holds a {type(described).__name__}; expected an object of inputs.")
    build_inputs(described)
    return described


def _build(name: str, description: Any) -> Any:
    match description:
        case {"shape": list(shape), "dtype": str(dtype), "fill": int(fill) | float(fill)} if _is_shape(shape):
            return _zeros(name, shape, dtype).fill_(fill)
        case {"shape": list(shape), "dtype": str(dtype)} if _is_shape(shape) and "fill" not in description:
            return _zeros(name, shape, dtype)
        case {"value": value}:
            return value
        case {"list": list(items)}:
            return [_build(name, item) for item in items]
        case {"tuple": list(items)}:
            return tuple(_build(name, item) for item in items)
        case {"dict": dict(items)}:
            return {key: _build(f"{name}.{key}", item) for key, item in items.items()}
    raise ConfigError(
        f"the input {name} is described as {description!r}; expected an object with shape and dtype, value, list, tuple "
        'or dict, such as {"shape": [1, 512, 4096], "dtype": "bfloat16"}.'
    )


def _is_shape(shape: list[Any]) -> bool:
    return all(isinstance(length, int) and length >= 0 for length in shape)


def _zeros(name: str, shape: list[int], dtype: str) -> "torch.Tensor":
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"the input {name} has dtype {dtype!r}; expected one of torch's, such as bfloat16 or int64.")
    return torch.zeros(shape, dtype=kind)
