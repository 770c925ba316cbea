"""What pending tensors stand for: buffers whose data is on its way, and operations that wait for it.

See [Note: pending tensors] in pending.py.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dit_pipelining.runtime.arguments import unflatten_arguments
from dit_pipelining.torch_internals import OpOverload, no_autocast, real_tensors, tracked_writes

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
        self._deferred: list[weakref.ref[Source]] = []
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
        wait_for([self])

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


class Layout(NamedTuple):
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


def layout_of(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


@dataclass(eq=False)
class Operation:
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
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    number: int = field(default_factory=_number.__next__)

    def run(self) -> torch.Tensor:
        values = [leaf.get() if isinstance(leaf, Source) else leaf for leaf in self.leaves]
        args, kwargs = unflatten_arguments(values, self.spec)
        result = self.func(*args, **kwargs)
        return result if self.index is None else result[self.index]


class Source:
    """What a pending tensor stands for: a buffer, or the result of a deferred operation.

    Attributes:
        layout: what the tensor answers with until the data is there.
        device: where it is, or will be.
        arrivals: what has to come before.
        value: the real tensor; of a deferred operation, once it has run.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        arrivals: Sequence[Arrival],
        value: torch.Tensor | None = None,
        operation: Operation | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.arrivals = arrivals
        self.value = value
        self.operation = operation
        self._error: Exception | None = None
        if operation is not None:
            for arrival in arrivals:
                arrival._deferred.append(weakref.ref(self))

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
            if isinstance(leaf, Source) and leaf.ready and leaf.value is not None:
                leaves[i] = copy_of(leaf.value)


def wait_for(arrivals: Sequence[Arrival]) -> None:
    """Wait for all of these, then run the deferred operations that have all they need."""
    try:
        for arrival in arrivals:
            arrival._receive()
    finally:
        # Also when a later one failed: what has come may now be written to.
        _run_deferred(arrival for arrival in arrivals if arrival.done)


def _run_deferred(arrivals: Iterable[Arrival]) -> None:
    waiting: dict[int, tuple[bool, Source]] = {}
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


def arrivals_of(sources: Iterable[Source]) -> list[Arrival]:
    """The arrivals that are still to come, each once, in order."""
    every = dict.fromkeys(arrival for source in sources for arrival in source.arrivals)
    return [arrival for arrival in every if not arrival.done]


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, overlapping ones included: results take their strides from their operands."""
    layout = layout_of(tensor)
    with torch.no_grad():
        memory = tensor.as_strided((layout.extent,), (1,)).clone()
        return memory.as_strided(layout.shape, layout.strides)
