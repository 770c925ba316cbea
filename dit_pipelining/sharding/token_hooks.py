"""Hooks that split a model's tokens, join them, and let its attention meet the other ranks.

They are diffusers' kind (`ModelHook`), but need no accelerator, as its own hooks for context parallelism do in practice. What a
hook does in the glue of a forward is captured with the glue; in a block, or another module that is recorded as one call, it
runs with that module.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from diffusers.hooks import ModelHook
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from dit_pipelining.diffusers_hooks import hooks_of
from dit_pipelining.errors import ConfigError, InputError
from dit_pipelining.sharding.groups import SequenceGroups, exchange_sizes, gather_parts, split_sizes
from dit_pipelining.sharding.sequence_plans import TEXT
from dit_pipelining.sharding.sp_plan import ModulePlan, SequenceParallelInput, Undivided
from dit_pipelining.sharding.token_attention import TokenAttention
from dit_pipelining.torch_internals import is_fake


@dataclass
class Tokens:
    """How the tokens of one model are split.

    Attributes:
        groups: the ranks that share them.
        uneven: whether ranks may have different numbers of them.
        latents: the name of what the model's output has as many tokens as.
        counts: of the whole tensors that the forward, while it is recorded, has split; by what they are called.
        undivided: inputs of the running forward as the caller gave them.
    """

    groups: SequenceGroups
    uneven: bool
    latents: str
    counts: dict[str, int] = field(default_factory=dict)
    undivided: dict[str, Any] = field(default_factory=dict)

    def split(self, tensor: torch.Tensor, dim: int, name: str) -> torch.Tensor:
        total, parts = tensor.shape[dim], self.groups.size
        if total < parts:
            raise InputError(
                f"{name}: {total} tokens cannot be split over {parts} ranks; lower ring_degree or ulysses_degree."
            )
        if total % parts and not self.uneven:
            raise InputError(
                f"{name}: {total} tokens cannot be split evenly over ring_degree={self.groups.ring_degree} x "
                f'ulysses_degree={self.groups.ulysses_degree} ranks. Use ulysses_mode="anything", or a size with a multiple '
                f"of {parts}."
            )
        self.counts[name] = total
        return tensor.split(split_sizes(total, parts), dim=dim)[self.groups.rank]

    def join(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        own, parts = tensor.shape[dim], self.groups.size
        if not self.uneven:
            return _joined(tensor, dim, (own,) * parts, self.groups)
        if is_fake(tensor):
            return _joined(tensor, dim, self._sizes(own), self.groups)
        return _joined(tensor, dim, exchange_sizes(self.groups, own)[0], self.groups)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ConfigError("a model whose tokens are split over ranks cannot be copied; copy it before.")

    def _sizes(self, own: int) -> tuple[int, ...]:
        """Those of the latents, or of what else this rank has a part of that size of."""
        latents = [count for name, count in self.counts.items() if name == self.latents]
        for count in (*latents, *self.counts.values()):
            sizes = split_sizes(count, self.groups.size)
            if sizes[self.groups.rank] == own:
                return sizes
        raise InputError(f"a forward joins parts of {own} tokens, but none that it split is of that size.")


def _joined(tensor: torch.Tensor, dim: int, sizes: Any, groups: SequenceGroups) -> torch.Tensor:
    """Join parts, as one call that is recorded as such."""

    def join_tokens(part: torch.Tensor) -> torch.Tensor:
        if has_torch_function((part,)):
            return handle_torch_function(join_tokens, (part,), part)
        return gather_parts(part, dim, sizes, groups.tokens)

    return join_tokens(tensor)


_ACTIVE: ContextVar[Tokens | None] = ContextVar("tokens of the running forward", default=None)
"""For forwards that split by hand."""

_WHOLE: ContextVar[bool] = ContextVar("the running forward is given all tokens", default=False)


@contextmanager
def whole_tokens() -> Iterator[None]:
    """Inside it, forwards split no tokens: each is what it would be on one rank."""
    outside = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(outside)


class TokenHook(ModelHook):
    """Splits inputs and outputs of one module, and joins outputs."""

    is_captured = True

    def __init__(self, name: str, plan: ModulePlan, tokens: Tokens) -> None:
        super().__init__()
        self.name = name
        self.plan = plan
        self.tokens = tokens

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self.parameters = list(inspect.signature(module.forward).parameters)
        unknown = [name for name in self.plan.inputs if name not in self.parameters]
        if unknown and self.name:
            raise ConfigError(
                f"the sequence-parallel plan splits the input {unknown[0]!r} of {self.name!r}, whose forward takes "
                f"{', '.join(self.parameters)}."
            )
        return module

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = self.fn_ref.original_forward
        if _WHOLE.get():
            return forward(*args, **kwargs)
        if self.name:
            return self._after(forward(*self._before(args, kwargs), **kwargs))
        tokens = self.tokens
        tokens.counts.clear()
        tokens.undivided.update(zip(self.parameters, args, strict=False), **kwargs)
        outside = _ACTIVE.set(tokens)
        try:
            return self._after(forward(*self._before(args, kwargs), **kwargs))
        finally:
            _ACTIVE.reset(outside)
            tokens.undivided.clear()

    def _before(self, args: Any, kwargs: dict[str, Any]) -> list[Any]:
        """The positional inputs with their parts split; the others are exchanged in place."""
        positional = list(args)
        for name, split in self.plan.inputs.items():
            if name in kwargs:
                kwargs[name] = self._part(kwargs[name], split, name)
            elif name in self.parameters and (place := self.parameters.index(name)) < len(positional):
                positional[place] = self._part(positional[place], split, name)
        return positional

    def _part(self, value: Any, split: Any, name: str) -> Any:
        if isinstance(split, Undivided):
            return self.tokens.undivided.get(split.name, value)
        if isinstance(value, list | tuple):
            splits = split if isinstance(split, tuple) else (split,) * len(value)
            return type(value)(self._part(v, s, name) for v, s in zip(value, splits, strict=True))
        if not isinstance(value, torch.Tensor):
            return value
        return self._split(value, split[0] if isinstance(split, tuple) else split, name)

    def _split(self, tensor: torch.Tensor, split: SequenceParallelInput, name: str) -> torch.Tensor:
        if split.expected_dims not in (None, tensor.ndim):
            return tensor
        return self.tokens.split(tensor, split.split_dim, name)

    def _after(self, output: Any) -> Any:
        if not self.plan.outputs and not self.plan.joined:
            return output
        parts = list(output) if isinstance(output, list | tuple) else [output]
        for index, split in self.plan.outputs.items():
            if index < len(parts) and isinstance(parts[index], torch.Tensor):
                parts[index] = self._split(parts[index], split, f"{self.name} output {index}")
        for index, join in enumerate(self.plan.joined):
            part = parts[index] if index < len(parts) else None
            if join is not None and isinstance(part, torch.Tensor) and join.expected_dims in (None, part.ndim):
                parts[index] = self.tokens.join(part, join.gather_dim)
        return type(output)(parts) if isinstance(output, list | tuple) else parts[0]


class AttentionHook(ModelHook):
    """Lets one attention module attend to the tokens of all ranks."""

    is_captured = True

    def __init__(self, name: str, tokens: Tokens, splits_text: bool) -> None:
        super().__init__()
        self.name = name
        self.tokens = tokens
        self.splits_text = splits_text

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        parameters = list(inspect.signature(module.forward).parameters)
        self.text_place = parameters.index(TEXT) if TEXT in parameters else None
        return module

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = self.fn_ref.original_forward
        if _WHOLE.get() or (not self.splits_text and self._has_text(args, kwargs)):
            return forward(*args, **kwargs)  # every rank has the whole text
        with TokenAttention(self.tokens.groups, self.tokens.uneven) as attention:
            output = forward(*args, **kwargs)
        if not attention.calls:
            raise ConfigError(
                f"the attention of {self.name!r} does not call torch's scaled_dot_product_attention, so that each rank would "
                "attend to its own tokens only. Use the attention backend 'native' with ulysses_degree or ring_degree."
            )
        return output

    def _has_text(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        if TEXT in kwargs:
            return kwargs[TEXT] is not None
        return self.text_place is not None and len(args) > self.text_place and args[self.text_place] is not None


def splits_tokens_of(model: nn.Module) -> bool:
    """Whether the tokens of each call of this model are split."""
    return any(isinstance(hook, TokenHook) for hook in hooks_of(model).values())


def sp_shard(tensor: torch.Tensor, dim: int, validate: bool = True) -> torch.Tensor:
    """This rank's part of a tensor; the tensor itself where the running model's tokens are not split.

    Args:
        tensor: the same on every rank.
        dim: along which it is split.
        validate: refuse a size that is no multiple of the ranks, unless the model runs with any number of tokens.

    Raises:
        InputError: the size is no multiple of the ranks, or smaller.
    """
    tokens = _ACTIVE.get()
    if tokens is None:
        return tensor
    if not validate and tensor.shape[dim] % tokens.groups.size:
        tokens.uneven = True
    return tokens.split(tensor, dim, tokens.latents)


def sp_gather(tensor: torch.Tensor, dim: int, validate: bool = True) -> torch.Tensor:
    """The parts of all ranks joined; the tensor itself where the running model's tokens are not split.

    Args:
        tensor: this rank's part.
        dim: along which it was split.
        validate: for the contract; parts of any sizes can be joined.
    """
    tokens = _ACTIVE.get()
    return tensor if tokens is None else tokens.join(tensor, dim)
