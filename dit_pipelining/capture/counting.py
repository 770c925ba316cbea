"""Count what operations on fake tensors would cost: floating-point operations, bytes moved, memory at its fullest.

Operations are those that reach torch's dispatcher, which is what an eager model launches: nothing is fused that torch does
not fuse itself.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dit_pipelining.capture.structure import tensors_in
from dit_pipelining.torch_internals import CPU_ATTENTION, DispatchMode, is_higher_order, storage_key


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention, 2 for a multiply-add; 0 for others.
        bytes: read and written.
        itemsize: bytes of an element of its result.
    """

    flops: int
    bytes: int
    itemsize: int


@dataclass(frozen=True)
class Work:
    """What a run of operations does.

    Attributes:
        operations: how often each occurs.
        peak_bytes: memory of the tensors that it makes, at its fullest.
    """

    operations: Mapping[Operation, int] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def flops(self) -> int:
        return sum(operation.flops * count for operation, count in self.operations.items())


class WorkCounter(DispatchMode):
    """Counts all operations inside it, in portions: `start` begins one, `taken` gives it and begins the next."""

    supports_higher_order_operators = True  # they are passed on, uncounted

    def __init__(self) -> None:
        super().__init__()
        self._operations: Counter[Operation] = Counter()
        self._live_bytes = self._peak = self._live_at_start = 0
        self._inside_attention = False

    def start(self) -> None:
        self._operations.clear()
        self._peak = self._live_at_start = self._live_bytes

    def taken(self) -> Work:
        work = Work(dict(self._operations), self._peak - self._live_at_start)
        self.start()
        return work

    def run_attention(self, attention: Callable[..., torch.Tensor], args: Any, kwargs: Any) -> torch.Tensor:
        """Run `scaled_dot_product_attention` and count it as the one fused kernel that GPUs have for it.

        On tensors without data torch may take the way of plain products, which makes the whole matrix of scores.
        """
        self._inside_attention = True
        try:
            result = attention(*args, **kwargs)
        finally:
            self._inside_attention = False
        read = list(tensors_in((args, kwargs)))
        flops = attention_flops(*(tensor.shape for tensor in read[:3]))
        moved = sum(map(_bytes, [*read, result]))
        self._operations[Operation(flops, moved, result.element_size())] += 1
        self._allocate(result.untyped_storage())
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_higher_order(func):
            return NotImplemented
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        with self:  # what is made of other operations counts as these
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if not func.is_view and not self._inside_attention:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read, written = list(tensors_in((args, kwargs))), list(tensors_in(result))
        packet = func._overloadpacket
        if packet is CPU_ATTENTION:  # torch's registry knows the kernels of GPUs only
            flops = attention_flops(*(tensor.shape for tensor in read[:3]))
        else:
            flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        moved = sum(map(_bytes, read)) + sum(map(_bytes, written))
        if packet in _GATHERS:
            moved = 2 * sum(map(_bytes, written))
        if moved and packet not in _UNWRITTEN:
            itemsize = written[0].element_size() if written else read[0].element_size()
            self._operations[Operation(int(flops), moved, itemsize)] += 1
        storages = {storage_key(tensor) for tensor in read if tensor.layout is torch.strided}
        for tensor in written:
            if tensor.layout is torch.strided and (key := storage_key(tensor)) not in storages:
                storages.add(key)
                self._allocate(tensor.untyped_storage())

    def _allocate(self, storage: Any) -> None:
        size = storage.nbytes()
        self._live_bytes += size
        self._peak = max(self._peak, self._live_bytes)
        weakref.finalize(storage, self._free, size).atexit = False

    def _free(self, size: int) -> None:
        self._live_bytes -= size


_GATHERS = {torch.ops.aten.embedding, torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.gather}
"""They read as much of their source as they write."""

_UNWRITTEN = {torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.empty_like, torch.ops.aten.new_empty}


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Scores and weighted values, for shapes (..., tokens, dim)."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory behind a tensor; an expanded one is read once."""
    size: int = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else size
