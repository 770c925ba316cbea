"""What a captured graph depends on: the structure, shapes and plain values of one call's inputs."""

import enum
import functools
import inspect
import types
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dit_pipelining.capture.structure import is_namedtuple
from dit_pipelining.errors import InputError
from dit_pipelining.torch_internals import autocast_state

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
"""Types of inputs that are part of the signature by value. Everything else but tensors and containers is an object that
is passed on by reference (a KV cache, a block mask)."""

MADE = "@made"
"""The path under which stages find the objects that glue makes during a call."""


@dataclass(frozen=True)
class CallInputs:
    """The inputs of one call, flattened.

    Attributes:
        kwargs: the call's keyword arguments as they came.
        tensors: every tensor by its path, for example `"controlnet_block_samples.0"`.
        objects: every object that is neither tensor, container nor constant, by its path.
        signature: hashable; two calls with equal signatures run the same captured graph, if the questions its glue
            asks about values have the same answers (`BlockGraph.questions`).
        made: objects that glue makes during the call, shared by the stages of this process.
    """

    kwargs: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    objects: dict[str, Any]
    signature: Hashable
    made: dict[int, Any] = field(default_factory=dict)

    @property
    def leaves(self) -> dict[str, Any]:
        """Tensors and objects by path, and `made` under the name `MADE`."""
        return {**self.tensors, **self.objects, MADE: self.made}


def bind(forward: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the arguments of a call of `forward` into keyword arguments, defaults included.

    Raises:
        InputError: an argument is unknown, missing, or given twice.
    """
    signature = _signature(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"these inputs do not fit the model's forward: {error}. It takes {', '.join(signature.parameters)}."
        ) from None
    bound.apply_defaults()  # so that a default left out and the same value given are the same call
    named = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
        elif parameter.kind is parameter.VAR_POSITIONAL and (nameless := named.pop(name)):
            raise InputError(f"pass the inputs by name: {name}={nameless!r} came without names.")
    return named


def _signature(forward: Any) -> inspect.Signature:
    """The signature of a forward; kept for methods, whose class does not change, since reading it costs a call's time."""
    if not isinstance(forward, types.MethodType):
        return inspect.signature(forward)
    return _signature_of_method(forward.__func__)


@functools.lru_cache(maxsize=256)
def _signature_of_method(function: Any) -> inspect.Signature:
    return inspect.signature(types.MethodType(function, object()))


def first_argument(forward: Any) -> str:
    """Name of a forward's first argument, which holds the latents."""
    return next(iter(inspect.signature(forward).parameters), "")


def flatten_inputs(kwargs: Mapping[str, Any]) -> CallInputs:
    """Flatten keyword arguments and compute their signature.

    Strides belong to the signature because `contiguous()` and `view` act on them; so does the autocast state.
    """
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, Any] = {}
    key: list[Any] = [autocast_state("cpu"), autocast_state("cuda")]
    for path, value in _walk(dict(sorted(kwargs.items())), ""):  # keywords have no order
        if isinstance(value, torch.Tensor):
            tensors[path] = value
            key.append((path, value.shape, value.stride(), value.dtype, value.device))
        elif isinstance(value, CONSTANTS):
            # 1, 1.0 and True are equal and hash alike, but a model can tell them apart.
            key.append((path, type(value), repr(value) if isinstance(value, float) else value))
        elif isinstance(value, _Container):
            key.append((path, value.kind, value.size))
        else:
            objects[path] = value
            key.append((path, type(value), *_object_key(value)))
    return CallInputs(dict(kwargs), tensors, objects, tuple(key))


def rebuild_inputs(kwargs: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs` with the tensors and objects at the given paths replaced; containers are new ones."""

    def build(value: Any, path: str) -> Any:
        if path in leaves:
            return leaves[path]
        if is_namedtuple(value):
            return type(value)(*(build(item, _join(path, i)) for i, item in enumerate(value)))
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return type(value)(build(item, _join(path, i)) for i, item in enumerate(value))
        if isinstance(value, dict):
            rebuilt = {name: build(item, _join(path, _key(name))) for name, item in value.items()}
            return rebuilt if type(value) is dict else type(value)(rebuilt)
        return value

    return {name: build(value, name) for name, value in kwargs.items()}


def object_parts(value: Any, known: Container[int] = ()) -> Iterator[tuple[tuple[tuple[str, Any], ...], Any]]:
    """Everything reachable from an object, with the steps that lead there.

    A step is `("attribute", name)` or `("item", key)`. Values already met are not visited again, and what is inside a
    value whose id is in `known` is not visited.
    """
    met: set[int] = set()
    pending: list[tuple[tuple[tuple[str, Any], ...], Any]] = [((), value)]
    while pending:
        steps, part = pending.pop()
        if isinstance(part, CONSTANTS) or id(part) in met or callable(part) or isinstance(part, nn.Module):
            continue
        met.add(id(part))
        yield steps, part
        if isinstance(part, torch.Tensor) or id(part) in known:
            continue
        if isinstance(part, list | tuple):
            pending += [((*steps, ("item", i)), item) for i, item in enumerate(part)]
        elif isinstance(part, dict):
            pending += [((*steps, ("item", name)), item) for name, item in part.items()]
        else:
            attributes = getattr(part, "__dict__", {})
            pending += [((*steps, ("attribute", name)), item) for name, item in attributes.items()]


@dataclass(frozen=True)
class ObjectTensor:
    """A tensor in an object: the steps that lead to it (see `object_parts`), its shape and dtype."""

    steps: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def complete_object(value: Any, tensors: Iterable[ObjectTensor]) -> None:
    """Put tensors without data where an object lacks some, because the blocks that fill them run on other ranks.

    The next forward that gets the object can then be captured; the stages of this rank do not touch them. A list that is
    too short, since blocks append to it, stays as it is.
    """
    for tensor in tensors:
        *path, (kind, key) = tensor.steps
        owner = value
        for step, name in path:
            owner = _step(owner, step, name)
        if isinstance(_step(owner, kind, key), torch.Tensor) or owner is None:
            continue
        missing = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if kind == "attribute":
            setattr(owner, key, missing)
        elif isinstance(owner, dict) or (isinstance(owner, list) and key < len(owner)):
            owner[key] = missing


def _step(owner: Any, kind: str, key: Any) -> Any:
    if kind == "attribute":
        return getattr(owner, key, None)
    if isinstance(owner, dict):
        return owner.get(key)
    return owner[key] if isinstance(owner, list | tuple) and key < len(owner) else None


def objects_in(value: Any) -> Iterator[Any]:
    """The objects, neither tensors nor constants, in nested arguments."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for item in value:
            yield from objects_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from objects_in(item)
    elif not isinstance(value, (torch.Tensor, slice, *CONSTANTS)) and hasattr(value, "__dict__"):
        yield value


def object_state(value: Any) -> Hashable:
    """What is in an object, tensors by identity."""
    state: list[Hashable] = []
    for steps, part in object_parts(value):
        if isinstance(part, torch.Tensor):
            state.append((steps, id(part)))
    return (*state, *_object_key(value))


def _object_key(value: Any) -> Iterator[Hashable]:
    for steps, part in object_parts(value):
        if isinstance(part, torch.Tensor):
            yield steps, part.shape, part.stride(), part.dtype, part.device
        elif isinstance(part, list | tuple):
            yield steps, type(part), len(part), tuple(_constant_key(item) for item in part)
        elif isinstance(part, dict):
            yield steps, type(part), tuple((repr(name), _constant_key(item)) for name, item in part.items())
        elif hasattr(part, "__dict__"):
            yield steps, type(part), tuple((name, _constant_key(item)) for name, item in vars(part).items())
        else:
            yield steps, type(part), _opaque_key(part)
    if callable(value) or isinstance(value, nn.Module):
        yield type(value), id(value)


def _constant_key(item: Any) -> Any:
    return (type(item), repr(item)) if isinstance(item, CONSTANTS) else type(item)


def _opaque_key(part: Any) -> Hashable:
    """What tells two objects without attributes apart: arrays, sets and ranges by their content, others by identity."""
    if hasattr(part, "tobytes"):
        return str(getattr(part, "dtype", "")), getattr(part, "shape", None), part.tobytes()
    if isinstance(part, set | frozenset | range):
        return repr(sorted(part, key=repr)) if not isinstance(part, range) else repr(part)
    return id(part)


@dataclass(frozen=True)
class _Container:
    kind: type
    size: int


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Size):
        yield path, value
    elif isinstance(value, list | tuple):
        yield path, _Container(type(value), len(value))
        for i, item in enumerate(value):
            yield from _walk(item, _join(path, i))
    elif isinstance(value, dict):
        yield path, _Container(type(value), len(value))
        for name, item in value.items():
            yield from _walk(item, _join(path, _key(name)))
    else:
        yield path, value


def _key(name: Any) -> str:
    """A dict's key as a part of a path: 1 and "1" differ, and so do "a.b" and a "b" inside "a"."""
    return name if isinstance(name, str) and "." not in name and not name.isdigit() else f"[{name!r}]"


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
