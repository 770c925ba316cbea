"""Transfers of GPU tensors over gloo, which carries CPU tensors only: through pinned host memory.

The slow way, for ranks that share a card (NCCL refuses those) or that have nothing better between them.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from dit_pipelining.comm.works import started

Post = Callable[[torch.Tensor], dist.Work | None]
"""Starts the transfer of a CPU tensor."""


class Transfer:
    """A transfer on its way, with `wait` as torch's works have it."""

    def __init__(self, work: dist.Work | None, host: torch.Tensor, arrives_in: torch.Tensor | None = None) -> None:
        self._work = started(work)
        self._host = host
        self._arrives_in = arrives_in

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait, on the host, for the transfer; the current stream then copies what has come to the GPU."""
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        if self._arrives_in is not None:
            self._arrives_in.copy_(self._host, non_blocking=True)


def start_receive(buffer: torch.Tensor, post: Post) -> Transfer:
    """Receive into `buffer`."""
    if buffer.device.type == "cpu":
        return Transfer(post(_bytes(buffer)), buffer)
    host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
    return Transfer(post(_bytes(host)), host, arrives_in=buffer)


def start_send(tensor: torch.Tensor, post: Post) -> Transfer:
    """Send a tensor; waits on the host until the current stream has computed it."""
    if tensor.device.type == "cpu":
        return Transfer(post(_bytes(tensor)), tensor)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    return Transfer(post(_bytes(host)), host)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as its bytes: gloo's broadcast knows some dtypes only."""
    return tensor.view(-1).view(torch.uint8)
