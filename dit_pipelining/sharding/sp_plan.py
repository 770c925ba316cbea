"""Plans that say where a model's tokens are split and where they are joined again.

A plan maps names of modules to what happens there; `""` is the model itself, `*` stands for every number in a list
(`"blocks.*"`). A dict splits inputs by the name of the forward's parameter, and outputs by their index (with
`split_output=True`); a SequenceParallelOutput, or a list of them, joins outputs. Models written for vLLM-Omni bring such
plans as `_sp_plan`, diffusers' models as `_cp_plan`; both are taken as they are.
"""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dit_pipelining.errors import ConfigError


@dataclass(frozen=True)
class SequenceParallelInput:
    """Split a tensor, or each tensor of a list.

    Attributes:
        split_dim: along which the tokens lie.
        expected_dims: number of dimensions of a tensor that is split; others (a timestep per sample instead of per token)
            stay as they are. Default: any.
        split_output: split what the module returns.
        auto_pad: the number of tokens need not be a multiple of the ranks. Nothing is padded: ranks have different numbers.
    """

    split_dim: int
    expected_dims: int | None = None
    split_output: bool = False
    auto_pad: bool = False


@dataclass(frozen=True)
class SequenceParallelOutput:
    """Join the parts of a tensor that a module returns.

    Attributes:
        gather_dim: along which the tokens lie.
        expected_dims: number of dimensions of a tensor that is joined; others stay as they are. Default: any.
    """

    gather_dim: int
    expected_dims: int | None = None


@dataclass(frozen=True)
class Undivided:
    """Give a module an input of the model as the caller gave it, although the model itself got a part of it."""

    name: str


Split = SequenceParallelInput | Undivided | tuple[SequenceParallelInput, ...]


@dataclass(frozen=True)
class ModulePlan:
    """What happens at one module.

    Attributes:
        inputs: by the name of the forward's parameter.
        outputs: by index.
        joined: the outputs that are joined, in order; None leaves one alone.
    """

    inputs: Mapping[str, Split] = field(default_factory=dict)
    outputs: Mapping[int, SequenceParallelInput] = field(default_factory=dict)
    joined: tuple[SequenceParallelOutput | None, ...] = ()

    def __or__(self, other: "ModulePlan") -> "ModulePlan":
        return ModulePlan(
            {**self.inputs, **other.inputs}, {**self.outputs, **other.outputs}, self.joined or other.joined
        )

    @property
    def splits(self) -> Iterator[SequenceParallelInput]:
        for split in (*self.inputs.values(), *self.outputs.values()):
            if not isinstance(split, Undivided):
                yield from split if isinstance(split, tuple) else (split,)


def read_plan(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, ModulePlan]:
    """A plan as what happens at each module of a model, by the module's name.

    Raises:
        ConfigError: the plan names modules that are not there, or holds something that is no split and no join.
    """
    if not isinstance(plan, Mapping):
        raise ConfigError(f"the sequence-parallel plan of {type(model).__name__} is no dict but {plan!r}.")
    found: dict[str, ModulePlan] = {}
    for pattern, entry in plan.items():
        own = _read_entry(pattern, entry)
        for name in _matching(model, pattern):
            found[name] = found.get(name, ModulePlan()) | own
    return found


def _read_entry(pattern: str, entry: Any) -> ModulePlan:
    if isinstance(entry, Mapping):
        inputs = {name: _read_split(pattern, value) for name, value in entry.items() if isinstance(name, str)}
        outputs = {index: _read_split(pattern, value) for index, value in entry.items() if isinstance(index, int)}
        for index, split in outputs.items():
            if not isinstance(split, SequenceParallelInput) or not split.split_output:
                raise ConfigError(f"{pattern!r}, output {index}: expected SequenceParallelInput(split_output=True).")
        return ModulePlan(inputs, outputs)  # type: ignore[arg-type]
    joins = entry if isinstance(entry, list | tuple) else (entry,)
    return ModulePlan(joined=tuple(_read_join(pattern, join) for join in joins))


def _read_split(pattern: str, value: Any) -> Split:
    if isinstance(value, Undivided):
        return value
    if isinstance(value, list | tuple):
        parts = [_read_split(pattern, part) for part in value]
        return tuple(part for part in parts if isinstance(part, SequenceParallelInput))
    if hasattr(value, "text_len_source"):
        raise ConfigError(
            f"{pattern!r}: {value!r} keeps the text whole on every rank, which needs an attention that knows where the text "
            "is. Split the text as well, with SequenceParallelInput."
        )
    if not hasattr(value, "split_dim"):
        raise ConfigError(f"{pattern!r}: expected SequenceParallelInput, not {value!r}.")
    return SequenceParallelInput(
        value.split_dim, value.expected_dims, value.split_output, getattr(value, "auto_pad", False)
    )


def _read_join(pattern: str, value: Any) -> SequenceParallelOutput | None:
    if value is None:
        return None
    if not hasattr(value, "gather_dim"):
        raise ConfigError(f"{pattern!r}: expected SequenceParallelOutput, not {value!r}.")
    return SequenceParallelOutput(value.gather_dim, value.expected_dims)


def _matching(model: nn.Module, pattern: str) -> Sequence[str]:
    depth = pattern.count(".")
    names = [name for name, _ in model.named_modules() if name.count(".") == depth]
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found and not any(_is_longer_list(model, pattern, place) for place in range(depth + 1)):
        raise ConfigError(f"the sequence-parallel plan of {type(model).__name__} names {pattern!r}, which it lacks.")
    return found


def _is_longer_list(model: nn.Module, pattern: str, place: int) -> bool:
    """Whether the pattern means a block of a bigger model: plans of a class can be written for its largest one."""
    parts = pattern.split(".")
    if not parts[place].isdigit() or place == 0:
        return False
    try:
        return isinstance(model.get_submodule(".".join(parts[:place])), nn.ModuleList)
    except AttributeError:
        return False
