"""Messages whose tensors take a process group. See [Note: messages] in messages.py."""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dit_pipelining.comm.cuda_streams import new_stream
from dit_pipelining.comm.links import Link
from dit_pipelining.comm.messages import Direction, Form, Message, Receiver, ShapeAndDtype
from dit_pipelining.comm.peer_channels import aligned
from dit_pipelining.comm.sends import SECONDS_TO_LEAVE, Sends

BUFFERS = 2
"""Messages a receiver holds: one in use, one arriving."""


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


class GroupReceiver(Receiver):
    """The end of a direction over a process group where messages arrive; `link` is what their tensors take."""

    def __init__(self, direction: Direction, link: Link, device: torch.device, form: Form, seconds: float) -> None:
        self.link = link
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._buffers = [
            _Buffer(torch.empty(0, dtype=torch.uint8, device=device), threading.Semaphore()) for _ in range(BUFFERS)
        ]
        self._number = 0
        super().__init__(direction, device, form, seconds)

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
            tensors = self._receive(buffer, self.form.layouts(header))
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
