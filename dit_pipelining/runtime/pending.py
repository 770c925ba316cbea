"""Results of transformer calls whose data may still be travelling.

[Note: pending tensors]
A diffusers pipeline calls its transformer, combines the results of the call's branches and takes a scheduler step. Only
the next call needs the numbers, so until then a result is a `PendingTensor`: its shape is known, its buffer exists, its
data is on the way. An operation on it goes one of four ways.

1. Views of a buffer are taken at once, on the buffer, so they alias as in eager, before and after the data has come.
2. Operations that only compute values from values (elementwise ones, casts, `cat`, `stack`), and views of their results,
   are deferred. Shape, strides and dtype of the result come from the same operation on the meta device.
3. `zeros_like`, `new_empty` and the like need no data and answer with ordinary tensors.
4. Everything else waits, and runs on the real tensors.

What keeps deferred results equal to eager ones: ordinary operands are copied when the operation is deferred; and whenever
data has come, all deferred operations that now can run do so, in the order they were written in, before anybody gets hold
of a real tensor and could write into it. Those that lack another arrival still copy what they need of this one.

Once the data has come, `__torch_function__` hands the real tensors to the operation before torch's dispatcher sees the
wrapper, so views and version counters are those of the real tensors too.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from dit_pipelining.errors import SplitError
from dit_pipelining.runtime.arguments import flatten_arguments, unflatten_arguments
from dit_pipelining.torch_internals import (
    PRIVATE_TENSOR_METHODS,
    composite_kernel,
    is_elementwise,
    is_tracked_view,
    no_autocast,
    no_torch_function,
    real_tensors,
    tracked_writes,
    tree_flatten,
    tree_map,
    tree_unflatten,
    wrapper_tensor,
)

__all__ = ["Arrival", "PendingTensor", "is_pending", "pending", "resolved"]

aten = torch.ops.aten

COPIES = {aten._to_copy.default, aten.clone.default, aten.cat.default, aten.stack.default}
"""Operations that move values and compute nothing, beside views."""

UNTAGGED_ELEMENTWISE = {aten.rsub.Tensor}
"""Elementwise operations that torch does not tag as such."""

FACTORIES = {
    aten.empty_like,
    aten.full_like,
    aten.ones_like,
    aten.rand_like,
    aten.randint_like,
    aten.randn_like,
    aten.zeros_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
}
"""Operations that look at the shape, dtype and device of a tensor and not at its data."""

FLAG_VIEWS = {aten._conj.default, aten._neg_view.default}
"""Views that set a flag of the tensor, which a wrapper cannot show."""

BESIDE_THE_DISPATCHER = {
    torch.Tensor.__array__,
    torch.Tensor.__bool__,
    torch.Tensor.__complex__,
    torch.Tensor.__cuda_array_interface__.__get__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__float__,
    torch.Tensor.__format__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.__repr__,
    torch.Tensor.apply_,
    torch.Tensor.cpu,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    torch.Tensor.data_ptr,
    torch.Tensor.is_shared,
    torch.Tensor.item,
    torch.Tensor.map2_,
    torch.Tensor.map_,
    torch.Tensor.numpy,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_,
    torch.Tensor.share_memory_,
    torch.Tensor.storage,
    torch.Tensor.storage_type,
    torch.Tensor.tolist,
    torch.Tensor.untyped_storage,
    *PRIVATE_TENSOR_METHODS,
}
"""Uses that do not come to `__torch_dispatch__`, or, like `float`, not where `torch.tensor([x, y])` calls them."""

_number = itertools.count()


class Arrival:
    """One transformer call's result in flight. Used by one thread: that of the request.

    Args:
        wait: returns when the data is in the buffers. It is called at most once, in the inference mode of whoever
            made the arrival, and forgotten then. On CUDA it makes the current stream wait, not the host.
    """

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait: Callable[[], object] | None = wait
        self._inference = torch.is_inference_mode_enabled()
        self._error: BaseException | None = None
        self._deferred: list[weakref.ref[_Source]] = []
        self._done = False

    @property
    def done(self) -> bool:
        """Whether the data is there: waiting for it has ended, and not with an error."""
        return self._done

    def wait(self) -> None:
        """Wait for the data, then run the deferred operations that have all they need.

        Raises:
            BaseException: what the callable raised; the same again each time.
        """
        _wait_for([self])

    def _receive(self) -> None:
        if self._error is not None:
            raise self._error
        if self._done:
            return
        wait, self._wait = self._wait, None
        if wait is None:
            raise RuntimeError("the data of a transformer's result was asked for by what waits for that data")
        try:
            with real_tensors(), no_autocast(), torch.inference_mode(self._inference), torch.no_grad():
                wait()
        except BaseException as error:
            self._error = error
            raise
        self._done = True


class _Layout(NamedTuple):
    """What can be known of a tensor without its data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def without_data(self) -> torch.Tensor:
        whole = torch.empty(self.offset + self.extent, dtype=self.dtype, device="meta")
        return whole.as_strided(self.shape, self.strides, self.offset)

    @property
    def extent(self) -> int:
        """How many elements lie from the first to the last one."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def _layout_of(tensor: torch.Tensor) -> _Layout:
    return _Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


@dataclass(eq=False)
class _Operation:
    """A deferred call of `func`; of its results the one at `index`, if there are several.

    Attributes:
        leaves: the flattened arguments; a pending one is its source.
        inference: whether it was written in inference mode.
        number: its place in the order of writing.
    """

    func: OpOverload
    leaves: list[Any]
    spec: Any
    index: int | None
    inference: bool
    number: int

    def run(self) -> torch.Tensor:
        values = [leaf.get() if isinstance(leaf, _Source) else leaf for leaf in self.leaves]
        args, kwargs = unflatten_arguments(values, self.spec)
        result = self.func(*args, **kwargs)
        return result if self.index is None else result[self.index]


class _Source:
    """What a pending tensor stands for: a buffer, or the result of a deferred operation.

    Attributes:
        layout: what the tensor answers with until the data is there.
        device: where it is, or will be.
        arrivals: what has to come before.
        value: the real tensor; of a deferred operation, once it has run.
    """

    def __init__(
        self,
        layout: _Layout,
        device: torch.device,
        arrivals: Sequence[Arrival],
        value: torch.Tensor | None = None,
        operation: _Operation | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.arrivals = arrivals
        self.value = value
        self.operation = operation
        self._error: Exception | None = None

    @property
    def ready(self) -> bool:
        return self.operation is None and all(arrival.done for arrival in self.arrivals)

    def get(self) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        assert self.value is not None, "asked for the result of an operation that has not run"
        return self.value

    def run(self) -> None:
        """Run the deferred operation. An error is kept for those who ask for the result."""
        assert self.operation is not None
        try:
            self.value = self.operation.run()
        except Exception as error:
            self._error = error
        self.operation = None

    def copy_operands(self) -> None:
        """Copy the operands that are there, since they may be written to before the others are."""
        assert self.operation is not None
        leaves = self.operation.leaves
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, _Source) and leaf.ready and leaf.value is not None:
                leaves[i] = _copy(leaf.value)


def _wait_for(arrivals: Sequence[Arrival]) -> None:
    try:
        for arrival in arrivals:
            arrival._receive()
    finally:
        # Also when a later one failed: what has come may now be written to.
        _run_deferred(arrival for arrival in arrivals if arrival.done)


def _run_deferred(arrivals: Iterable[Arrival]) -> None:
    waiting: dict[int, tuple[bool, _Source]] = {}
    for arrival in arrivals:
        for reference in arrival._deferred:
            source = reference()
            if source is not None and source.operation is not None:
                waiting[source.operation.number] = source.operation.inference, source
        arrival._deferred.clear()
    if not waiting:
        return
    with real_tensors(), no_autocast():
        in_order = (waiting[number] for number in sorted(waiting))
        for inference, group in itertools.groupby(in_order, lambda entry: entry[0]):
            with torch.inference_mode(inference), torch.no_grad(), tracked_writes():
                for _, source in group:
                    if all(arrival.done for arrival in source.arrivals):
                        source.run()
                    else:
                        source.copy_operands()


class PendingTensor(torch.Tensor):
    """A tensor whose data may still be travelling; made by `pending`. See [Note: pending tensors].

    Raises:
        SplitError: an operation on it would have to record gradients before the data is there.
    """

    _source: _Source

    @staticmethod
    def __new__(cls, source: _Source) -> "PendingTensor":
        return wrapper_tensor(cls, *source.layout, source.device)

    def __init__(self, source: _Source) -> None:
        self._source = source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = flatten_arguments(args, kwargs or {})
        sources = [leaf._source for leaf in leaves if isinstance(leaf, PendingTensor)]
        if sources and (func in BESIDE_THE_DISPATCHER or all(source.ready for source in sources)):
            real_args, real_kwargs = unflatten_arguments(_resolve(leaves), spec)
            return func(*real_args, **real_kwargs)
        with no_torch_function():
            result = func(*args, **(kwargs or {}))
        waited = bool(sources) and all(source.ready for source in sources)
        return tree_map(_real, result) if waited else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves, spec = flatten_arguments(args, kwargs or {})
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise SplitError(
                f"{func} would record gradients through a transformer's result that may still be travelling; "
                "run the pipeline under torch.no_grad()"
            )
        if any(is_pending(tensor) for tensor in tensors):
            composite = composite_kernel(func)
            if composite is not None:  # In inference mode they come here whole; what they are made of may be deferred.
                return composite(*args, **(kwargs or {}))
            answer = _without_waiting(func, leaves, spec, tensors)
            if answer is not NotImplemented:
                return answer
        real_args, real_kwargs = unflatten_arguments(_resolve(leaves), spec)
        with tracked_writes():
            result = func(*real_args, **real_kwargs)
        # Torch notes next that the result is a view of the wrapper; it refuses what is known as one of the real tensor.
        return tree_map(_wrap_view, result) if func.is_view else result


def pending(buffers: Any, arrival: Arrival) -> Any:
    """The nested structure with its tensors as pending tensors over them.

    Args:
        buffers: lists, tuples, dicts and diffusers outputs of tensors that are used through the result only.
        arrival: says when their data is there.
    """

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return PendingTensor(_Source(_layout_of(leaf), leaf.device, (arrival,), value=leaf))

    return tree_map(wrap, buffers)


def resolved(structure: Any) -> Any:
    """The nested structure with ordinary tensors in place of pending ones; waits for all that is still to come."""
    leaves, spec = tree_flatten(structure)
    if not any(isinstance(leaf, PendingTensor) for leaf in leaves):
        return structure
    return tree_unflatten(_resolve(leaves), spec)


def is_pending(value: Any) -> bool:
    """Whether `value` is a tensor that has to be waited for before its data can be used."""
    return isinstance(value, PendingTensor) and not value._source.ready


def _real(leaf: Any) -> Any:
    return leaf._source.get() if isinstance(leaf, PendingTensor) else leaf


def _wrap_view(leaf: Any) -> Any:
    if type(leaf) is not torch.Tensor or not is_tracked_view(leaf):
        return leaf
    return PendingTensor(_Source(_layout_of(leaf), leaf.device, (), value=leaf))


def _resolve(leaves: list[Any]) -> list[Any]:
    _wait_for(_arrivals_of(leaf._source for leaf in leaves if isinstance(leaf, PendingTensor)))
    return [_real(leaf) for leaf in leaves]


def _arrivals_of(sources: Iterable[_Source]) -> list[Arrival]:
    """The arrivals that are still to come, each once, in order."""
    every = dict.fromkeys(arrival for source in sources for arrival in source.arrivals)
    return [arrival for arrival in every if not arrival.done]


def _without_waiting(func: OpOverload, leaves: list[Any], spec: Any, tensors: list[torch.Tensor]) -> Any:
    """The result of an operation that has no need to wait, else NotImplemented."""
    known = (torch.Tensor, torch.nn.Parameter, PendingTensor)
    if any(type(tensor) not in known or tensor.layout is not torch.strided for tensor in tensors):
        return NotImplemented
    sources = [tensor._source for tensor in tensors if isinstance(tensor, PendingTensor)]
    if func.overloadpacket in FACTORIES:
        args, kwargs = unflatten_arguments([_layout_if_tensor(leaf) for leaf in leaves], spec)
        args = [arg.without_data() if isinstance(arg, _Layout) else arg for arg in args]
        return func(*args, **{**kwargs, "device": kwargs.get("device") or sources[0].device})
    if _is_view(func):
        if sources[0].value is not None:
            return _view_buffer(func, leaves, spec, sources[0])
    elif func not in COPIES and not _is_elementwise(func):
        return NotImplemented
    return _defer(func, leaves, spec, tensors, sources)


@functools.cache
def _is_view(func: OpOverload) -> bool:
    return (func.is_view or func is aten._unsafe_view.default) and func not in FLAG_VIEWS


@functools.cache
def _is_elementwise(func: OpOverload) -> bool:
    return is_elementwise(func) or func in UNTAGGED_ELEMENTWISE


def _view_buffer(func: OpOverload, leaves: list[Any], spec: Any, source: _Source) -> Any:
    args, kwargs = unflatten_arguments(
        [source.value if isinstance(leaf, PendingTensor) else leaf for leaf in leaves], spec
    )
    with tracked_writes():
        views = func(*args, **kwargs)
    return tree_map(lambda v: PendingTensor(_Source(_layout_of(v), source.device, source.arrivals, value=v)), views)


def _defer(func: OpOverload, leaves: list[Any], spec: Any, tensors: list[torch.Tensor], sources: list[_Source]) -> Any:
    device = _device_of(tensors)
    arguments = tuple(_argument(func, leaf) for leaf in leaves)
    try:
        results = _results(func, arguments, spec, device, torch.get_default_dtype())
    except (
        Exception
    ):  # Whatever it is: the operation itself has the better message, or can do what meta tensors cannot.
        return NotImplemented
    if device is None or results is None:
        return NotImplemented
    arrivals = _arrivals_of(sources)
    operands = [_operand(leaf) for leaf in leaves]

    def result(layout: _Layout, index: int | None) -> PendingTensor:
        operation = _Operation(func, list(operands), spec, index, torch.is_inference_mode_enabled(), next(_number))
        source = _Source(layout, device, arrivals, operation=operation)
        for arrival in arrivals:
            arrival._deferred.append(weakref.ref(source))
        return PendingTensor(source)

    if isinstance(results, list):
        return [result(layout, index) for index, layout in enumerate(results)]
    return result(results, None)


def _argument(func: OpOverload, leaf: Any) -> tuple[type, Hashable]:
    """What the layout of the result of `func` depends on in one argument: of numbers to compute with, the type."""
    if isinstance(leaf, torch.Tensor):
        return _Layout, _layout_if_tensor(leaf)
    if isinstance(leaf, int | float | complex) and _is_elementwise(func):
        return type(leaf), type(leaf)(1)
    return type(leaf), leaf


@functools.lru_cache(maxsize=4096)  # A meta operation takes longer than a real one on latents, and steps repeat.
def _results(
    func: OpOverload,
    arguments: tuple[tuple[type, Any], ...],
    spec: Any,
    device: torch.device | None,
    default_dtype: torch.dtype,
) -> _Layout | list[_Layout] | None:
    """The layout of the result, or of each result, of an operation that may be deferred; None for one that may not."""
    leaves = [value.without_data() if kind is _Layout else value for kind, value in arguments]
    args, kwargs = unflatten_arguments(leaves, spec)
    if kwargs.get("pin_memory") or kwargs.pop("device", None) not in (None, device):
        return None
    with real_tensors():
        results = func(*args, **kwargs)
    if not isinstance(results, torch.Tensor):
        return [_layout_of(result) for result in results] if _is_view(func) else None
    integers = not (results.is_floating_point() or results.is_complex() or results.dtype is torch.bool)
    if integers and _is_elementwise(func):
        # Division and powers of integers refuse some values; that error belongs where the operation is written.
        return None
    return _layout_of(results)


def _layout_if_tensor(leaf: Any) -> Any:
    if isinstance(leaf, PendingTensor):
        source = leaf._source
        return _layout_of(source.get()) if source.ready else source.layout
    return _layout_of(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _operand(leaf: Any) -> Any:
    """What a deferred operation keeps of an argument: what is there already may be written to before it runs."""
    if isinstance(leaf, PendingTensor):
        return _copy(leaf._source.get()) if leaf._source.ready else leaf._source
    return _copy(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, overlapping ones included: results take their strides from their operands."""
    layout = _layout_of(tensor)
    with torch.no_grad():
        memory = tensor.as_strided((layout.extent,), (1,)).clone()
        return memory.as_strided(layout.shape, layout.strides)


def _device_of(tensors: list[torch.Tensor]) -> torch.device | None:
    """The device of an elementwise result; numbers on the CPU go along with tensors anywhere. None if they do not fit."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
    return devices.pop() if len(devices) == 1 else None
