"""Latents that rank 0 gets from the last stage: waited for when they are first used."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dit_pipelining.mixins.intermediate_tensors import Handle, settle

LATENTS = "latents"
"""The name under which a message holds latents that are one tensor."""


class AsyncLatents:
    """Stands for latents that may still be on their way; any use of it waits, once, and acts on the tensor.

    Use is: an attribute or method (`latents.shape`, `latents.to(...)`), an operator (`latents * 2`, `latents[0]`), a torch
    function that finds it among its arguments, also inside lists, tuples and dicts. `torch.as_tensor` shares its memory.

    Args:
        tensor_dict: holds the latents under `key` once the handles are waited for.
        handles: transfers to wait for, in order.
        postproc: what to call after that, in order.
        key: the name of these latents among the message's.
    """

    __slots__ = ("_handles", "_key", "_postproc", "_tensor", "_tensor_dict")

    def __init__(
        self,
        tensor_dict: dict[str, torch.Tensor],
        handles: Sequence[Handle],
        postproc: Sequence[Callable[[], Any]],
        key: str = LATENTS,
    ) -> None:
        self._tensor_dict = tensor_dict
        self._handles = handles
        self._postproc = postproc
        self._key = key
        self._tensor: torch.Tensor | None = None

    def _resolve(self) -> torch.Tensor:
        """The latents; waits for them the first time."""
        if self._tensor is None:
            settle(list(self._handles), list(self._postproc))
            self._tensor = self._tensor_dict[self._key]
            self._handles, self._postproc = [], []
        return self._tensor

    def __getattr__(self, name: str) -> Any:
        if name in AsyncLatents.__slots__:  # copying and unpickling look before there is anything to resolve
            raise AttributeError(name)
        return getattr(self._resolve(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*resolved(args), **resolved(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._resolve().__reduce_ex__(protocol)

    def __copy__(self) -> torch.Tensor:
        return self._resolve()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._resolve().__deepcopy__(memo)

    def __repr__(self) -> str:
        return "AsyncLatents(on their way)" if self._tensor is None else f"AsyncLatents({self._tensor!r})"


def resolved(value: Any) -> Any:
    """The value with tensors in the place of AsyncLatents, also inside lists, tuples and dicts."""
    if isinstance(value, AsyncLatents):
        return value._resolve()
    if isinstance(value, dict):
        return {key: resolved(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(resolved(item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(resolved(item) for item in value)
    return value


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: AsyncLatents, *args: Any) -> Any:
        return getattr(self._resolve(), name)(*resolved(args))

    apply.__name__ = name
    return apply


# Python looks operators up on the class, never by __getattr__.
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OPERATORS = (
    *(f"__{name}__" for name in _BINARY),
    *(f"__r{name}__" for name in _BINARY),
    *(f"__i{name}__" for name in _BINARY if name != "matmul"),
    *("__neg__", "__pos__", "__abs__", "__invert__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__getitem__", "__setitem__", "__len__", "__iter__", "__contains__"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__format__", "__array__"),
)
for _name in _OPERATORS:
    setattr(AsyncLatents, _name, _operator(_name))
AsyncLatents.__hash__ = object.__hash__  # type: ignore[method-assign]  # as a tensor's: by identity
