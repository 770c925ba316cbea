"""Messages from one rank to another: a header of fixed size over the host, then the tensors that it announces.

[Note: messages]
The header goes when the tensors are there to be sent, so the receiver posts their receive when it can be served: an NCCL
kernel that waits would take multiprocessors from the stages. A thread receives ahead of the computation, into two buffers
in turn: while one message is computed with, the next one arrives. On CUDA the buffer's next receive waits for the
computation that read it, and the computation for the receive, both on the device.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.comm.cuda_streams import new_stream
from dit_pipelining.comm.host_memory import Transfer, start_receive, start_send

Layout = tuple[tuple[int, ...], torch.dtype]

BUFFERS = 2
"""Messages a receiver holds: one in use, one arriving."""

SENDS_IN_FLIGHT = 8

SECONDS_TO_LEAVE = 60.0
"""How long a rank that leaves waits for its last messages to be taken."""


@dataclass(frozen=True)
class Direction:
    """One direction between two ranks; both make it, in the same order as all others.

    Attributes:
        source, target: ranks.
        headers: a gloo group of the two.
        data: the group the tensors take: over gloo or NCCL.
        backend: of `data`.
    """

    source: int
    target: int
    headers: dist.ProcessGroup
    data: dist.ProcessGroup
    backend: str


class Sender:
    """The end of a direction that messages are sent from.

    Args:
        direction: this rank is its source.
        device: of the tensors.
    """

    def __init__(self, direction: Direction, device: torch.device) -> None:
        self.direction = direction
        self.device = device
        self.error: BaseException | None = None
        self._unfinished: deque[tuple[Any, Any]] = deque()
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
        while self._unfinished and self.error is None:
            self._unfinished.popleft()[0].wait()

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
        own = self.direction
        self._keep(dist.isend(header, own.target, group=own.headers), header)
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(
                    torch.cuda.current_stream(self.device)
                )  # a wait for the work is one of the stream only
            self._keep(_start_send(own, tensor), tensor)

    def _keep(self, work: Any, tensor: torch.Tensor) -> None:
        self._unfinished.append((work, tensor))
        while len(self._unfinished) > SENDS_IN_FLIGHT:
            self._unfinished.popleft()[0].wait()


@dataclass
class _Buffer:
    """Flat memory of one message, and when what is computed with it is done."""

    memory: torch.Tensor
    free: threading.Semaphore
    done: Any = None


@dataclass(frozen=True)
class Message:
    """What has arrived: `tensors` lie in a buffer and are valid until `Receiver.release`."""

    header: torch.Tensor
    tensors: list[torch.Tensor]
    arrived: Any
    buffer: Any


class Receiver:
    """The end of a direction where messages arrive.

    Args:
        direction: this rank is its target.
        device: of the tensors.
        header_length: numbers in a header.
        layouts: the tensors that a header announces.
        is_last: whether nothing comes after this header.
        seconds: how long to wait for a message.
    """

    def __init__(
        self,
        direction: Direction,
        device: torch.device,
        header_length: int,
        layouts: Callable[[torch.Tensor], Sequence[Layout]],
        is_last: Callable[[torch.Tensor], bool],
        seconds: float,
    ) -> None:
        self.direction = direction
        self.device = device
        self.seconds = seconds
        self._length = header_length
        self._layouts = layouts
        self._is_last = is_last
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._buffers = [
            _Buffer(torch.empty(0, dtype=torch.uint8, device=device), threading.Semaphore()) for _ in range(BUFFERS)
        ]
        self._arrived: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="receiver", daemon=True)
        self._thread.start()

    @contextmanager
    def next(self) -> Iterator[Message]:
        """The next message; its tensors are valid inside the context, for work given to the current stream.

        Raises:
            TimeoutError: none came in time.
        """
        try:
            message = self._arrived.get(timeout=self.seconds)
        except queue.Empty:
            raise TimeoutError(
                f"rank {self.direction.target} got no message from rank {self.direction.source} within {self.seconds:.0f} s."
            ) from None
        if isinstance(message, BaseException):
            raise message
        if message.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(message.arrived)
        yield message
        if message.arrived is not None:
            message.buffer.done = torch.cuda.current_stream(self.device).record_event()
        message.buffer.free.release()

    @property
    def has_message(self) -> bool:
        """Whether `next` would not have to wait."""
        return not self._arrived.empty()

    def close(self) -> None:
        """Wait for the thread, which ends with the last message."""
        self._thread.join(SECONDS_TO_LEAVE)

    def _work(self) -> None:
        try:
            number, last = 0, False
            while not last:
                header = _receive_header(self.direction, self._length)
                last = self._is_last(header)
                buffer = self._buffers[number % BUFFERS]
                number += 1
                buffer.free.acquire()
                with torch.cuda.stream(self._stream) if self._stream is not None else _nothing():
                    tensors = self._receive(buffer, self._layouts(header))
                    arrived = self._stream.record_event() if self._stream is not None else None
                self._arrived.put(Message(header, tensors, arrived, buffer))
        except BaseException as error:
            self._arrived.put(error)

    def _receive(self, buffer: _Buffer, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        sizes = [_aligned(torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in layouts]
        if buffer.done is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.done)
        if sum(sizes) > buffer.memory.numel():
            buffer.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        tensors, works, offset = [], [], 0
        for (shape, dtype), size in zip(layouts, sizes, strict=True):
            part = buffer.memory[offset : offset + torch.Size(shape).numel() * dtype.itemsize]
            tensors.append(part.view(dtype).view(shape))
            works.append(_start_receive(self.direction, tensors[-1]))
            offset += size
        for work in works:
            work.wait()
        return tensors


def warm_up(directions: Sequence[Direction], device: torch.device) -> None:
    """A transfer in each direction, one after the other; all their ranks call this.

    What NCCL makes at the first transfer would else hold up the GPU in the middle of a stream.
    """
    for own in directions:
        probe = torch.zeros(1, device=device)
        if dist.get_rank() == own.source:
            _start_send(own, probe).wait()
        elif dist.get_rank() == own.target:
            _start_receive(own, probe).wait()


def receive_one(direction: Direction, header_length: int, layouts: Sequence[Layout], device: torch.device) -> list[Any]:
    """The tensors of one message, for directions that are used now and then: received when they are asked for."""
    _receive_header(direction, header_length)
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in layouts]
    for work in [_start_receive(direction, tensor) for tensor in tensors]:
        work.wait()
    return tensors


def _receive_header(direction: Direction, length: int) -> torch.Tensor:
    header = torch.empty(length, dtype=torch.float64)
    work = dist.irecv(header, direction.source, group=direction.headers)
    assert work is not None  # this rank is in the group
    work.wait()
    return header


def _start_send(direction: Direction, tensor: torch.Tensor) -> Any:
    if direction.backend == "gloo":
        return start_send(tensor, lambda part: dist.isend(part, direction.target, group=direction.data))
    return dist.isend(tensor, direction.target, group=direction.data)


def _start_receive(direction: Direction, tensor: torch.Tensor) -> "dist.Work | Transfer":
    if direction.backend == "gloo":
        return start_receive(tensor, lambda part: dist.irecv(part, direction.source, group=direction.data))
    work = dist.irecv(tensor, direction.source, group=direction.data)
    assert work is not None  # this rank is in the group
    return work


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _aligned(size: int) -> int:
    return -(-size // 256) * 256
