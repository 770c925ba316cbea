"""The types of a ParallelConfig's fields: values from files and variables are compared with the annotations."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dit_pipelining.errors import ConfigError

NOT_CHECKED = ("partition", "partitioner", "told")
"""Errors of block counts are CountsErrors, a partitioner's lists those that there are, and nobody writes what is told."""

EXPECTED = {
    "profile": "a file of `dit-pipelining profile`, or a device such as 'h200'",
    "ranks": "descriptions of ranks, such as 'rtx4090,rtx3090' or ['24GB', '16GB']",
    "blocks": "names of blocks or block lists, such as ['transformer_blocks']",
    "text_encoder_tp_size": "an integer of at least 1, or such integers by component name, such as {'text_encoder_2': 4}",
    "timeout_seconds": "a number of seconds above 0",
    "component_ranks": "ranks by component name, such as {'vae': 0}, or 'all' in place of a rank",
    "output_ranks": "'all' or ranks, such as [0]",
}
"""What fields hold whose annotation alone does not say it well."""


def check_types(config: Any) -> None:
    """Compare the fields of a ParallelConfig with their annotations.

    Raises:
        ConfigError: one holds something else; says which, what, and what was expected.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if field.name not in NOT_CHECKED and not _fits(value, hint):
            raise ConfigError(f"{field.name}={value!r}: expected {EXPECTED.get(field.name) or _described(hint)}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in args)
    if origin is Literal:
        return any(isinstance(value, type(each)) and value == each for each in args)
    if origin is Sequence:
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_sequence and all(_fits(item, args[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, args[0]) and _fits(item, args[1]) for key, item in value.items()
        )
    if hint in (int, float):  # True is an int, and 1 will do for 1.0
        return isinstance(value, (int,) if hint is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint)


def _described(hint: Any) -> str:
    """For example `one of rolling, gpipe`."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    if choices:
        return f"one of {', '.join([*(['None'] if NoneType in parts else []), *choices])}"
    if bool in parts:
        return "True or False"
    return f"an integer of at least 1{', or None' * (NoneType in parts)}"
