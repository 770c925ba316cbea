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
from collections.abc import Hashable
from typing import Any

import torch

from dit_pipelining.errors import SplitError
from dit_pipelining.runtime.arguments import flatten_arguments, unflatten_arguments
from dit_pipelining.runtime.operations import BESIDE_THE_DISPATCHER, COPIES, FACTORIES, computes_elementwise, is_view
from dit_pipelining.runtime.sources import Arrival, Layout, Operation, Source, arrivals_of, copy_of, layout_of, wait_for
from dit_pipelining.torch_internals import (
    OpOverload,
    composite_kernel,
    is_tracked_view,
    no_torch_function,
    real_tensors,
    tracked_writes,
    tree_flatten,
    tree_map,
    tree_unflatten,
    wrapper_tensor,
)

__all__ = ["PendingTensor", "is_pending", "pending", "resolved"]


class PendingTensor(torch.Tensor):
    """A tensor whose data may still be travelling; made by `pending`. See [Note: pending tensors].

    Raises:
        SplitError: an operation on it would have to record gradients before the data is there.
    """

    _source: Source

    @staticmethod
    def __new__(cls, source: Source) -> "PendingTensor":
        return wrapper_tensor(cls, *source.layout, source.device)

    def __init__(self, source: Source) -> None:
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
        return PendingTensor(Source(layout_of(leaf), leaf.device, (arrival,), value=leaf))

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
    return PendingTensor(Source(layout_of(leaf), leaf.device, (), value=leaf))


def _resolve(leaves: list[Any]) -> list[Any]:
    wait_for(arrivals_of(leaf._source for leaf in leaves if isinstance(leaf, PendingTensor)))
    return [_real(leaf) for leaf in leaves]


def _without_waiting(func: OpOverload, leaves: list[Any], spec: Any, tensors: list[torch.Tensor]) -> Any:
    """The result of an operation that has no need to wait, else NotImplemented."""
    known = (torch.Tensor, torch.nn.Parameter, PendingTensor)
    if any(type(tensor) not in known or tensor.layout is not torch.strided for tensor in tensors):
        return NotImplemented
    sources = [tensor._source for tensor in tensors if isinstance(tensor, PendingTensor)]
    if func.overloadpacket in FACTORIES:
        args, kwargs = unflatten_arguments([_layout_if_tensor(leaf) for leaf in leaves], spec)
        args = [arg.without_data() if isinstance(arg, Layout) else arg for arg in args]
        return func(*args, **{**kwargs, "device": kwargs.get("device") or sources[0].device})
    if is_view(func):
        if sources[0].value is not None:
            return _view_buffer(func, leaves, spec, sources[0])
    elif func not in COPIES and not computes_elementwise(func):
        return NotImplemented
    return _defer(func, leaves, spec, tensors, sources)


def _view_buffer(func: OpOverload, leaves: list[Any], spec: Any, source: Source) -> Any:
    args, kwargs = unflatten_arguments(
        [source.value if isinstance(leaf, PendingTensor) else leaf for leaf in leaves], spec
    )
    with tracked_writes():
        views = func(*args, **kwargs)
    return tree_map(lambda v: PendingTensor(Source(layout_of(v), source.device, source.arrivals, value=v)), views)


def _defer(func: OpOverload, leaves: list[Any], spec: Any, tensors: list[torch.Tensor], sources: list[Source]) -> Any:
    device = _device_of(tensors)
    arguments = tuple(_argument(func, leaf) for leaf in leaves)
    try:
        results = _results(func, arguments, spec, device, torch.get_default_dtype())
    except Exception:  # whatever it is: the operation itself has the better message, or can do what meta tensors cannot
        return NotImplemented
    if device is None or results is None:
        return NotImplemented
    arrivals = arrivals_of(sources)
    operands = [_operand(leaf) for leaf in leaves]

    def result(layout: Layout, index: int | None) -> PendingTensor:
        return PendingTensor(Source(layout, device, arrivals, operation=Operation(func, list(operands), spec, index)))

    if isinstance(results, list):
        return [result(layout, index) for index, layout in enumerate(results)]
    return result(results, None)


def _argument(func: OpOverload, leaf: Any) -> tuple[type, Hashable]:
    """What the layout of the result of `func` depends on in one argument: of numbers to compute with, the type."""
    if isinstance(leaf, torch.Tensor):
        return Layout, _layout_if_tensor(leaf)
    if isinstance(leaf, int | float | complex) and computes_elementwise(func):
        return type(leaf), type(leaf)(1)
    return type(leaf), leaf


@functools.lru_cache(maxsize=4096)  # A meta operation takes longer than a real one on latents, and steps repeat.
def _results(
    func: OpOverload,
    arguments: tuple[tuple[type, Any], ...],
    spec: Any,
    device: torch.device | None,
    default_dtype: torch.dtype,
) -> Layout | list[Layout] | None:
    """The layout of the result, or of each result, of an operation that may be deferred; None for one that may not."""
    leaves = [value.without_data() if kind is Layout else value for kind, value in arguments]
    args, kwargs = unflatten_arguments(leaves, spec)
    if kwargs.get("pin_memory") or kwargs.pop("device", None) not in (None, device):
        return None
    with real_tensors():
        results = func(*args, **kwargs)
    if not isinstance(results, torch.Tensor):
        return [layout_of(result) for result in results] if is_view(func) else None
    integers = not (results.is_floating_point() or results.is_complex() or results.dtype is torch.bool)
    if integers and computes_elementwise(func):
        # Division and powers of integers refuse some values; that error belongs where the operation is written.
        return None
    return layout_of(results)


def _layout_if_tensor(leaf: Any) -> Any:
    if isinstance(leaf, PendingTensor):
        source = leaf._source
        return layout_of(source.get()) if source.ready else source.layout
    return layout_of(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _operand(leaf: Any) -> Any:
    """What a deferred operation keeps of an argument: what is there already may be written to before it runs."""
    if isinstance(leaf, PendingTensor):
        return copy_of(leaf._source.get()) if leaf._source.ready else leaf._source
    return copy_of(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _device_of(tensors: list[torch.Tensor]) -> torch.device | None:
    """The device of an elementwise result; numbers on the CPU go along with tensors anywhere. None if they do not fit."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
    return devices.pop() if len(devices) == 1 else None
