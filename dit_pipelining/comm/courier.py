"""Transfers over NCCL, each posted on both sides when its data is there.

[Note: posted on a message]
An NCCL kernel waits on the GPU until the other side's kernel comes. Meanwhile it takes multiprocessors from the stages
(measured on two H200: they become 12 to 52% slower), and whatever lies behind it in its hardware queue waits too: with
transfers posted ahead, the first calls of a pipeline hung. So the sender's host waits until the tensor is computed and says
so over gloo; only then do both sides post the transfer, which waits for nothing but the wire.

Hosts wait in threads of their own, one per link and direction, so that stages are launched meanwhile.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.comm.cuda_streams import new_stream
from dit_pipelining.comm.works import started

GroupPost = Callable[[torch.Tensor, dist.ProcessGroup], dist.Work | None]
"""Starts one side of a transfer over a group."""


class Delivery:
    """A transfer on its way, with `wait` as torch's works have it."""

    def __init__(self, posted: "Future[torch.cuda.Event | None]", device: torch.device) -> None:
        self._posted = posted
        self._device = device

    def wait(self) -> None:
        """Wait on the host until the transfer is posted, and on the current stream until it is done."""
        done = self._posted.result()
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)


class Courier:
    """Posts the transfers of one link, in their order.

    Args:
        notices: a gloo group of the link's ranks.
        data: a group of the same ranks, for the tensors.
        device: of this rank.
    """

    def __init__(self, notices: dist.ProcessGroup, data: dist.ProcessGroup, device: torch.device) -> None:
        self.notices = notices
        self.data = data
        self.device = device
        self.stream = new_stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "courier")

    def send(self, tensor: torch.Tensor, post: GroupPost) -> Delivery:
        """Send what the current stream computes; the tensor must live until it is waited for."""
        computed = self._mark()

        def run() -> Any:
            if computed is not None:
                computed.synchronize()
            self._notice(post)
            return self._transfer(tensor, post)

        return Delivery(self._thread.submit(run), self.device)

    def receive(self, buffer: torch.Tensor, post: GroupPost) -> Delivery:
        """Receive into a buffer that the current stream has no more use for."""
        free = self._mark()

        def run() -> Any:
            self._notice(post)
            if free is not None:
                assert self.stream is not None
                self.stream.wait_event(free)
            return self._transfer(buffer, post)

        return Delivery(self._thread.submit(run), self.device)

    def _mark(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event() if self.stream is not None else None

    def _notice(self, post: GroupPost) -> None:
        started(post(torch.zeros(1, dtype=torch.uint8), self.notices)).wait()

    def _transfer(self, tensor: torch.Tensor, post: GroupPost) -> Any:
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            started(post(tensor, self.data)).wait()
            return self._mark()
