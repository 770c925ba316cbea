"""Ranks make the same calls with the same arguments, and draw from the same random numbers.

Every rank runs the whole pipeline around the transformer, so a rank with another prompt, size or seed would mix its own
latents with the others', or wait for a transfer that never comes. At the start of a call each rank sends 48 bytes.
"""

import enum
import functools
import hashlib
import inspect
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from dit_pipelining.errors import InputError
from dit_pipelining.random_state import random_state, set_random_state

DIGEST_BYTES = 16
RANDOM_STATE = slice(2 * DIGEST_BYTES, 3 * DIGEST_BYTES)
DEEPEST = 20
LONGEST_VALUE = 60
ABSENT = "not given"


def agree(call: str, arguments: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare this call with the other ranks', and take over the random state of rank 0 where it is another.

    Args:
        call: what is called, for example the class of the pipeline.
        arguments: those that were given, by name; their order does not matter.
        group: of all ranks, over gloo.
        device: of this rank.

    Raises:
        InputError: on every rank, if something differs; names what, where, and the values.
    """
    digests = {name: digest(value) for name, value in arguments.items()}
    everything = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(digests):
        everything.update(digest(name) + digests[name])
    mine = digest(call) + everything.digest() + digest(random_state(device))
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    ranks = [bytes(theirs.tolist()) for theirs in gathered]
    if len({theirs[: RANDOM_STATE.start] for theirs in ranks}) > 1:
        _refuse(call, arguments, digests, group)
    if len({theirs[RANDOM_STATE] for theirs in ranks}) > 1:
        _share_random_state(group, device)


def given_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `function` by name, whether given by name or by position."""
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
    except TypeError:  # the call itself will say what is wrong
        return {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    arguments = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def digest(value: Any) -> bytes:
    """Equal for equal values, on whichever rank and device they are.

    Numbers, text, containers, tensors, arrays, images and generators by content, functions by name, other objects by type.
    """
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in _parts(value, 0):
        state.update(struct.pack("<q", len(part)))
        state.update(part)
    return state.digest()


def describe(value: Any) -> str:
    """A value in a few words, for a message about it."""
    if isinstance(value, torch.Tensor):
        kind, content = f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}", True
    elif isinstance(value, np.ndarray):
        kind, content = f"{value.dtype} array {value.shape}", True
    elif isinstance(value, Image.Image):
        kind, content = f"{value.mode} image {value.width}x{value.height}", True
    elif isinstance(value, torch.Generator):
        kind, content = f"generator with seed {value.initial_seed()}", True
    elif isinstance(value, list | tuple) and any(not _is_plain(item) for item in value):
        return _shortened(f"[{', '.join(describe(item) for item in value)}]", value)
    elif _is_plain(value) or isinstance(value, list | tuple | Mapping | AbstractSet):
        return _shortened(repr(value), value)
    else:
        name = getattr(value, "__qualname__", None)
        return f"{name}" if name else f"{type(value).__name__} object"
    return f"{kind} with content {digest(value).hex()[:6]}" if content else kind


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | enum.Enum | os.PathLike)


def _shortened(text: str, value: Any) -> str:
    """The text as far as there is room; two that begin alike are told apart by their content."""
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... with content {digest(value).hex()[:6]}"


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    """The bytes that make a value; each container says how many items follow."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        yield f"enum {type(value).__qualname__}.{value.name}".encode()
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        yield f"{type(value).__name__} {value!r}".encode(errors="surrogatepass")
    elif isinstance(value, os.PathLike):
        yield f"path {os.fspath(value)!r}".encode(errors="surrogatepass")
    elif isinstance(value, torch.device):
        yield f"device {value.type}".encode()  # each rank has its own
    elif isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield _tensor_bytes(value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"array {value.dtype.str} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Image.Image):
        yield f"image {value.mode} {value.size}".encode()
        yield value.tobytes()
    elif isinstance(value, torch.Generator):
        yield f"generator {value.device.type}".encode()
        yield _tensor_bytes(value.get_state())
    elif isinstance(value, functools.partial):
        yield from _parts(["partial", value.func, value.args, value.keywords], depth)
    elif isinstance(value, np.ndarray):
        yield f"array {value.shape}".encode()
        yield from _parts(value.ravel().tolist(), depth)
    elif depth < DEEPEST and isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for item in value:
            yield from _parts(item, depth + 1)
    elif depth < DEEPEST and isinstance(value, Mapping | AbstractSet):
        items = value.items() if isinstance(value, Mapping) else value
        yield f"{type(value).__name__} of {len(value)}".encode()
        yield from sorted(b"".join(_parts(item, depth + 1)) for item in items)
    else:
        named = value if hasattr(value, "__qualname__") else type(value)
        yield f"object {named.__module__}.{named.__qualname__}".encode()


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        return b""  # by shape and dtype: pipelines take no such inputs
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def _refuse(call: str, arguments: Mapping[str, Any], digests: Mapping[str, bytes], group: dist.ProcessGroup) -> None:
    own = call, {name: (digests[name], describe(value)) for name, value in arguments.items()}
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    if len({theirs[0] for theirs in gathered}) > 1:
        shown = _by_value([(theirs[0], theirs[0]) for theirs in gathered])
        raise InputError(f"the ranks made different calls: {shown}. Every rank has to make the same calls.")
    names = dict.fromkeys(name for _, theirs in gathered for name in theirs)
    different = []
    for name in names:
        values = [theirs.get(name, (b"", ABSENT)) for _, theirs in gathered]
        if len({value for value, _ in values}) > 1:
            different.append(f"{name} ({_by_value(values)})")
    raise InputError(
        f"the ranks called {call} with different arguments: {'; '.join(different)}. Every rank has to be given the same; "
        "what only one rank is to do (save, print), do after the call or by its rank within a callback."
    )


def _by_value(values: Sequence[tuple[object, str]]) -> str:
    """For example `rank 0: 'a cat', ranks 1 and 2: 'a dog'`."""
    ranks: dict[object, list[int]] = {}
    for rank, (value, _) in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{'rank' if len(own) == 1 else 'ranks'} {', '.join(map(str, own))}: {values[own[0]][1]}"
        for own in ranks.values()
    )


def _share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """A call without a generator draws the same noise everywhere: what rank 0 draws, as in one process."""
    states = random_state(device)
    for state in states:
        dist.broadcast(state, group_src=0, group=group)
    set_random_state(states, device)
