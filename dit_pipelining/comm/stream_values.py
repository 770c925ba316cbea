"""Let a CUDA stream wait for a number in device memory, or write one, without a kernel and without the host.

The driver's stream memory operations (CUDA driver API, "Stream Memory Operations"): the wait is done by the front end of
the GPU, so it takes no multiprocessor from the kernels of other streams, as a waiting NCCL kernel does. torch has the
write but not the wait, hence the driver's own functions.
"""

import ctypes
import functools
from typing import Any

import torch

WAIT_GREATER_OR_EQUAL = 0
"""CU_STREAM_WAIT_VALUE_GEQ: cyclic, `(int32) (memory - value) >= 0`, so a counter may wrap around."""


def wait_value(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Work given to `stream` from now on starts once the 32-bit counter at `address` has reached `value`."""
    _call("cuStreamWaitValue32_v2", stream, address, value, WAIT_GREATER_OR_EQUAL)


def write_value(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Set the 32-bit counter at `address`, which may be another GPU's, after all work given to `stream` so far."""
    _call("cuStreamWriteValue32_v2", stream, address, value, 0)


def _call(name: str, stream: torch.cuda.Stream, address: int, value: int, flags: int) -> None:
    function = getattr(_driver(), name)
    code = function(
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value % (1 << 32)),
        ctypes.c_uint(flags),
    )
    if code != 0:
        raise RuntimeError(f"{name} failed with the CUDA driver's error {code}")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
