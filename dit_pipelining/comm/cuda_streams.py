"""CUDA streams of our own, and waits and writes of numbers in device memory: without a kernel and without the host.

The driver's stream memory operations (CUDA driver API, "Stream Memory Operations"): the wait is done by the front end of
the GPU, so it takes no multiprocessor from the kernels of other streams, as a waiting NCCL kernel does. torch has the
write but not the wait, hence the driver's own functions.
"""

import ctypes
import functools
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, TypeVar

import torch

WAIT_GREATER_OR_EQUAL = 0
"""CU_STREAM_WAIT_VALUE_GEQ: cyclic, `(int32) (memory - value) >= 0`, so a counter may wrap around."""

NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: does not wait for the default stream."""

Item = TypeVar("Item")


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream that is not of torch's pool.

    Streams share the GPU's hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 32 at most), and one that waits holds up what
    comes behind it in its queue, whatever stream that is of. torch makes 32 streams of a priority when the first is asked
    for, so its streams of two priorities share queues; the few that are made here do not.

    Args:
        device: a GPU.
        priority: 0, or -1 for a higher one.
    """
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # initialises CUDA
        _check("cuStreamCreateWithPriority", ctypes.byref(handle), ctypes.c_uint(NON_BLOCKING), ctypes.c_int(priority))
    return torch.cuda.ExternalStream(handle.value or 0, device=device)


def on_own_stream(items: Generator[Item, None, None], device: torch.device) -> Iterator[Item]:
    """Iterate so that what is made is made on a CUDA stream of its own, and what is done with it on the current one.

    The two take turns on the GPU: each waits for all that was given to the other before.
    """
    if device.type != "cuda":
        yield from items
        return
    own = new_stream(device)
    with closing(items):
        while True:
            caller = torch.cuda.current_stream(device)
            own.wait_stream(caller)
            with torch.cuda.stream(own):
                item = next(items, None)
            caller.wait_stream(own)
            if item is None:
                return
            yield item


def current_context() -> ctypes.c_void_p:
    """The driver's context of this thread."""
    context = ctypes.c_void_p()
    _check("cuCtxGetCurrent", ctypes.byref(context))
    return context


def enter_context(context: ctypes.c_void_p) -> None:
    """Make a context this thread's: one that has not used CUDA yet has none, and then the functions here fail."""
    _check("cuCtxSetCurrent", context)


def wait_value(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Work given to `stream` from now on starts once the 32-bit counter at `address` has reached `value`."""
    _access("cuStreamWaitValue32_v2", stream, address, value, WAIT_GREATER_OR_EQUAL)


def write_value(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Set the 32-bit counter at `address`, which may be another GPU's, after all work given to `stream` so far."""
    _access("cuStreamWriteValue32_v2", stream, address, value, 0)


def _access(name: str, stream: torch.cuda.Stream, address: int, value: int, flags: int) -> None:
    _check(
        name,
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value % (1 << 32)),
        ctypes.c_uint(flags),
    )


def _check(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name} failed with the CUDA driver's error {code}")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
