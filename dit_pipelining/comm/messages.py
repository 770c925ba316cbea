"""Messages from one rank to another: a header of fixed size over the host, then the tensors that it announces.

[Note: messages]
Over process groups the header goes when the tensors are there to be sent, so the receiver posts their receive when it can be
served: an NCCL kernel that waits would take multiprocessors from the stages. A thread receives ahead of the computation,
into two buffers in turn: while one message is computed with, the next one arrives. On CUDA the buffer's next receive waits
for the computation that read it, and the computation for the receive, both on the device.

Between GPUs of one host the tensors take a channel of peer copies. Then the header goes at once: it tells the host what to
give to its GPU, which waits for the tensors itself (peer_messages.py).
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.comm.links import Link
from dit_pipelining.comm.peer_channels import Channel
from dit_pipelining.comm.sends import SECONDS_TO_LEAVE
from dit_pipelining.comm.works import started

ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Form:
    """What the messages of a direction are like.

    Attributes:
        length: numbers in a header.
        layouts: the tensors that a header announces.
        is_last: whether nothing comes after this header.
    """

    length: int
    layouts: Callable[[torch.Tensor], Sequence[ShapeAndDtype]]
    is_last: Callable[[torch.Tensor], bool]


@dataclass(frozen=True)
class Direction:
    """One direction between two ranks; both make it, in the same order as all others.

    Attributes:
        source, target: ranks.
        headers: a gloo group of the two.
        data: what the tensors take; None on ranks that are neither of the two.
    """

    source: int
    target: int
    headers: dist.ProcessGroup
    data: Link | Channel | None

    def send_header(self, header: torch.Tensor) -> dist.Work:
        """Post a send of a header, which must live until the work is waited for."""
        return started(dist.isend(header, self.target, group=self.headers))

    def receive_header(self, length: int) -> torch.Tensor:
        """Wait for a header."""
        header = torch.empty(length, dtype=torch.float64)
        started(dist.irecv(header, self.source, group=self.headers)).wait()
        return header


@dataclass(frozen=True)
class Message:
    """What has arrived; its tensors lie in memory that later messages use again, see `next` of the receivers."""

    header: torch.Tensor
    tensors: list[torch.Tensor]
    arrived: Any = None
    buffer: Any = None


class Receiver:
    """The end of a direction where messages arrive; a thread takes them in.

    Args:
        direction: this rank is its target.
        device: of the tensors.
        form: of the messages.
        seconds: how long to wait for one.
    """

    def __init__(self, direction: Direction, device: torch.device, form: Form, seconds: float) -> None:
        self.direction = direction
        self.device = device
        self.form = form
        self.seconds = seconds
        self._arrived: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._first: Message | BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="receiver", daemon=True)
        self._thread.start()

    def peek(self) -> torch.Tensor | None:
        """The header of the next message, if it is there."""
        if self._first is None:
            try:
                self._first = self._arrived.get_nowait()
            except queue.Empty:
                return None
        if isinstance(self._first, BaseException):
            raise self._first
        return self._first.header

    def close(self) -> None:
        """Wait for the thread, which ends with the last message."""
        self._thread.join(SECONDS_TO_LEAVE)

    def take(self) -> Message:
        """The next message.

        Raises:
            TimeoutError: none came in time.
        """
        message, self._first = self._first, None
        try:
            message = message or self._arrived.get(timeout=self.seconds)
        except queue.Empty:
            raise TimeoutError(
                f"rank {self.direction.target} got no message from rank {self.direction.source} within {self.seconds:.0f} s."
            ) from None
        if isinstance(message, BaseException):
            raise message
        return message

    def _work(self) -> None:
        try:
            last = False
            while not last:
                header = self.direction.receive_header(self.form.length)
                last = self.form.is_last(header)
                self._arrived.put(self._message(header))
        except BaseException as error:
            self._arrived.put(error)

    def _message(self, header: torch.Tensor) -> Message:
        return Message(header, [])
