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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.comm.cuda_streams import new_stream
from dit_pipelining.comm.links import Link
from dit_pipelining.comm.peer_channels import Channel, aligned
from dit_pipelining.comm.sends import SECONDS_TO_LEAVE, Sends

ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]

Announced = Callable[[torch.Tensor], Sequence[ShapeAndDtype]]
"""The tensors that a header announces."""

BUFFERS = 2
"""Messages a receiver holds: one in use, one arriving."""


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
        work = dist.isend(header, self.target, group=self.headers)
        assert work is not None  # this rank is in the group
        return work

    def receive_header(self, length: int) -> torch.Tensor:
        """Wait for a header."""
        header = torch.empty(length, dtype=torch.float64)
        work = dist.irecv(header, self.source, group=self.headers)
        assert work is not None  # this rank is in the group
        work.wait()
        return header


class GroupSender:
    """The end of a direction over a process group that messages are sent from.

    Args:
        direction: this rank is its source.
        link: that the tensors take.
        device: of the tensors.
    """

    def __init__(self, direction: Direction, link: Link, device: torch.device) -> None:
        self.direction = direction
        self.link = link
        self.device = device
        self.error: BaseException | None = None
        self._sends = Sends()
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if device.type == "cuda":  # the host has to wait for the tensors, and the caller shall not
            self._thread = threading.Thread(target=self._work, name="sender", daemon=True)
            self._thread.start()

    def send(self, header: torch.Tensor, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message; the tensors must not be written into afterwards."""
        if self.error is not None:
            raise self.error
        tensors = [tensor.contiguous() for tensor in tensors]
        if self._thread is None:
            self._post(header, tensors)
        else:
            self._jobs.put((torch.cuda.current_stream(self.device).record_event(), header, tensors))

    def close(self) -> None:
        """Wait until everything is sent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(SECONDS_TO_LEAVE)
        self._sends.finish(lambda: self.error is not None)

    def _work(self) -> None:
        try:
            # A stream of its own: on the caller's, a transfer would wait for what was computed after it.
            with torch.cuda.stream(new_stream(self.device)):
                while (job := self._jobs.get()) is not None:
                    event, header, tensors = job
                    event.synchronize()
                    self._post(header, tensors)
        except BaseException as error:
            self.error = error

    def _post(self, header: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self._sends.keep(self.direction.send_header(header), header)
        for tensor in tensors:
            if tensor.device.type == "cuda":  # a wait for the work is one of the stream only
                tensor.record_stream(torch.cuda.current_stream(self.device))
            self._sends.keep(self.link.send(tensor), tensor)


@dataclass
class _Buffer:
    """Flat memory of one message, and when what is computed with it is done."""

    memory: torch.Tensor
    free: threading.Semaphore
    done: Any = None


@dataclass(frozen=True)
class Message:
    """What has arrived; its tensors lie in memory that later messages use again, see `next` of the receivers."""

    header: torch.Tensor
    tensors: list[torch.Tensor]
    arrived: Any = None
    buffer: Any = None


class Headers:
    """What has arrived in a direction, taken in by a thread.

    Args:
        direction: this rank is its target.
        length: numbers in a header.
        is_last: whether nothing comes after this header.
        seconds: how long to wait for a message.
    """

    def __init__(
        self, direction: Direction, length: int, is_last: Callable[[torch.Tensor], bool], seconds: float
    ) -> None:
        self.direction = direction
        self.seconds = seconds
        self._length = length
        self._is_last = is_last
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
                header = self.direction.receive_header(self._length)
                last = self._is_last(header)
                self._arrived.put(self._message(header))
        except BaseException as error:
            self._arrived.put(error)

    def _message(self, header: torch.Tensor) -> Message:
        return Message(header, [])


class GroupReceiver(Headers):
    """The end of a direction over a process group where messages arrive.

    Args:
        direction: this rank is its target.
        link: that the tensors take.
        device: of the tensors.
        length: numbers in a header.
        layouts: the tensors that a header announces.
        is_last: whether nothing comes after this header.
        seconds: how long to wait for a message.
    """

    def __init__(
        self,
        direction: Direction,
        link: Link,
        device: torch.device,
        length: int,
        layouts: Announced,
        is_last: Callable[[torch.Tensor], bool],
        seconds: float,
    ) -> None:
        self.link = link
        self.device = device
        self._layouts = layouts
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._buffers = [
            _Buffer(torch.empty(0, dtype=torch.uint8, device=device), threading.Semaphore()) for _ in range(BUFFERS)
        ]
        self._number = 0
        super().__init__(direction, length, is_last, seconds)

    @contextmanager
    def next(self) -> Iterator[Message]:
        """The next message; its tensors are valid inside the context, for work given to the current stream.

        Raises:
            TimeoutError: none came in time.
        """
        message = self.take()
        if message.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(message.arrived)
        yield message
        if message.arrived is not None:
            message.buffer.done = torch.cuda.current_stream(self.device).record_event()
        message.buffer.free.release()

    def _message(self, header: torch.Tensor) -> Message:
        buffer = self._buffers[self._number % BUFFERS]
        self._number += 1
        buffer.free.acquire()
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            tensors = self._receive(buffer, self._layouts(header))
            arrived = self._stream.record_event() if self._stream is not None else None
        return Message(header, tensors, arrived, buffer)

    def _receive(self, buffer: _Buffer, layouts: Sequence[ShapeAndDtype]) -> list[torch.Tensor]:
        sizes = [aligned(torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in layouts]
        if buffer.done is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.done)
        if sum(sizes) > buffer.memory.numel():
            buffer.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        tensors, works, offset = [], [], 0
        for (shape, dtype), size in zip(layouts, sizes, strict=True):
            part = buffer.memory[offset : offset + torch.Size(shape).numel() * dtype.itemsize]
            tensors.append(part.view(dtype).view(shape))
            works.append(self.link.receive(tensors[-1]))
            offset += size
        for work in works:
            work.wait()
        return tensors
