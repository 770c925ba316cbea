"""Dictionaries of tensors from one rank to another: one message each, as long as shapes stay what they were.

[Note: messages]
A message is a flat buffer: a header of fixed size, then the tensors one after another. Its receive is posted when the
receiver asks for it, long before the data are there, so the receiver must know the size in advance. It takes the layout
(names, dtypes, shapes, strides) of the message WINDOW before it, which it has read by then. Where the sender finds that this
guess holds, the one message is all. Where it does not (the first messages; another resolution) the sender puts only the
header where the data were expected (gloo takes fewer bytes than the buffer has), then a description unless the layout is
that of the message just before, then the data; these travel under another tag, so receives that are posted already do not
take them. WINDOW is a multiple of 2, 3 and 4: branches of guidance whose shapes differ each find their own layout again.

Tensors on GPUs of a NCCL group do not go through the buffer: the header tells the host that they come, and only then are
their receives posted, straight from and into device memory. A receive that waits on the GPU takes compute units away from
the stage (measured on two H200: a GEMM beside it is 1.1 to 1.5 times slower), one that the host holds back does not; the
sender's host is ahead of its GPU, so the receive is still posted before the data exist.

Receivers get views of a buffer that is theirs alone: nothing is written over what a caller may have kept.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.mixins.message_layout import Layout, Place, layout_of

WINDOW = 12
LEAVING = timedelta(seconds=2)
"""How long a rank that gives its groups back waits for each transfer: after an error the other side may be gone."""
MOST_UNDER_WAY = 6 * WINDOW
"""Transfers of host memory that a sender has not waited for: a receiver reads after WINDOW messages at the latest."""
HEADER_BYTES = 64
MAGIC = 0x6469745F7070  # "dit_pp"
EXPECTED, AS_BEFORE, DESCRIBED = range(3)
"""Where the data are: in the message itself, or in one of their own with a layout that is known, or is described first."""
MESSAGES, EXTRAS = 0, 1
"""Tags."""


class OutOfStepError(RuntimeError):
    """What arrived is not the message that was waited for: the ranks did not make the same calls."""


@dataclass
class Counter:
    """How many transfers between hosts this process has posted, by their tags; benchmarks read it."""

    messages: int = 0
    extras: int = 0


@dataclass
class _Direction:
    """What the sender and the receiver of one direction both know about its messages."""

    layouts: list[Layout] = field(default_factory=lambda: [Layout()] * WINDOW)
    before: Layout = field(default_factory=Layout)
    count: int = 0

    def remember(self, sequence: int, layout: Layout) -> None:
        self.layouts[sequence % WINDOW] = self.before = layout


class SentMessage:
    """Transfers under way from this rank, and the memory that they read."""

    def __init__(self, text: str, under_way: "deque[tuple[dist.Work, torch.Tensor, str]]") -> None:
        self._text = text
        self._under_way = under_way
        self._works: list[dist.Work] = []
        self._buffers: list[torch.Tensor] = []

    def add(self, work: dist.Work | None, buffer: torch.Tensor) -> None:
        assert work is not None  # this rank is in the group
        self._works.append(work)
        self._buffers.append(buffer)

    def add_copy(self, work: dist.Work | None, buffer: torch.Tensor) -> None:
        """A transfer of memory that is the message's own. It may last until the receiver reads, which it may never do."""
        assert work is not None  # this rank is in the group
        self._under_way.append((work, buffer, self._text))

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait until the memory may be reused; at most the group's timeout."""
        for work in self._works:
            _wait(work, self._text)
        self._works, self._buffers = [], []


class Sender:
    """Sends dictionaries of tensors to one rank.

    Args:
        peer: the receiving rank, in the default group.
        host_group: gloo, for buffers in host memory.
        device_group: NCCL, for tensors on GPUs; None sends them through host memory.
        counter: counts what is posted.
    """

    def __init__(
        self, peer: int, host_group: dist.ProcessGroup, device_group: dist.ProcessGroup | None, counter: Counter
    ) -> None:
        self.peer = peer
        self._host, self._device = host_group, device_group
        self._direction, self._counter = _Direction(), counter
        self._under_way: deque[tuple[dist.Work, torch.Tensor, str]] = deque()

    def finish(self) -> None:
        """Wait until the receiver has taken everything, before the group ends: gloo's hangs with a transfer under way."""
        while self._under_way:
            self._wait_for_oldest(LEAVING)

    def send(self, tensors: Mapping[str, Any]) -> SentMessage:
        """Post a message. Tensors in it may be changed at once, except those on GPUs of a NCCL group.

        Raises:
            TypeError: a value is neither a tensor nor None, a bool, a number or a text.
        """
        direction = self._direction
        sequence = direction.count
        expected, layout = direction.layouts[sequence % WINDOW], layout_of(tensors, self._device is not None)
        sent = SentMessage(f"a message to rank {self.peer} ({', '.join(tensors)})", self._under_way)
        while len(self._under_way) > MOST_UNDER_WAY:
            self._wait_for_oldest()
        if layout == expected:
            buffer = _packed(layout, tensors, HEADER_BYTES)
            _write_header(buffer, sequence, EXPECTED, 0, layout.host_bytes)
            self._post(sent, buffer, MESSAGES)
        else:
            kind = AS_BEFORE if layout == direction.before else DESCRIBED
            description = _as_bytes(layout) if kind == DESCRIBED else b""
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            _write_header(header, sequence, kind, len(description), layout.host_bytes)
            self._post(sent, header, MESSAGES)
            if description:
                self._post(sent, torch.frombuffer(bytearray(description), dtype=torch.uint8), EXTRAS)
            if layout.host_bytes:
                self._post(sent, _packed(layout, tensors, 0), EXTRAS)
        for place in layout.device_places:
            tensor = place.dense(tensors[place.name])
            sent.add(dist.isend(tensor, self.peer, group=self._device), tensor)
        direction.remember(sequence, layout)
        direction.count += 1
        return sent

    def _wait_for_oldest(self, timeout: timedelta | None = None) -> None:
        work, _, text = self._under_way.popleft()
        _wait(work, text, timeout)

    def _post(self, sent: SentMessage, buffer: torch.Tensor, tag: int) -> None:
        self._counter.messages += tag == MESSAGES
        self._counter.extras += tag == EXTRAS
        sent.add_copy(dist.isend(buffer, self.peer, group=self._host, tag=tag), buffer)


class Receiver:
    """Receives dictionaries of tensors from one rank, in the order in which they are sent.

    Args:
        peer: the sending rank, in the default group.
        host_group, device_group: see `Sender`.
        device: where tensors go that the sender had on an accelerator.
    """

    def __init__(
        self,
        peer: int,
        host_group: dist.ProcessGroup,
        device_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.peer = peer
        self._host, self._device_group, self._device = host_group, device_group, device
        self._direction = _Direction()
        self._posted: deque[ReceivedMessage] = deque()

    def receive(self) -> "ReceivedMessage":
        """Post the receive of the next message; its `tensors` are filled by `wait`."""
        direction = self._direction
        if len(self._posted) == WINDOW:
            self._posted[0].wait()  # its layout is what the next receive needs to know
        expected = direction.layouts[direction.count % WINDOW]
        buffer = _host_buffer(HEADER_BYTES + expected.host_bytes, expected.staged)
        work = dist.irecv(buffer, self.peer, group=self._host, tag=MESSAGES)
        assert work is not None  # this rank is in the group
        message = ReceivedMessage(self, direction.count, expected, buffer, work)
        direction.count += 1
        self._posted.append(message)
        return message

    def finish(self) -> None:
        """Read what was posted and nobody has waited for, so that its sender can end."""
        if self._posted:
            self.read_up_to(self._posted[-1], LEAVING)

    def read_up_to(self, message: "ReceivedMessage", timeout: timedelta | None = None) -> None:
        """Read the posted messages in their order, up to this one: what follows on other tags and groups has an order."""
        while not message.done:
            self._posted[0].read(timeout)
            self._posted.popleft()

    def layout_after(self, sequence: int, kind: int, description_bytes: int, expected: Layout) -> Layout:
        """The layout that a header announces."""
        if kind == EXPECTED:
            layout = expected
        elif kind == AS_BEFORE:
            layout = self._direction.before
        else:
            layout = _from_bytes(self.extra(description_bytes, staged=False))
        self._direction.remember(sequence, layout)
        return layout

    def extra(self, size: int, staged: bool) -> torch.Tensor:
        buffer = _host_buffer(size, staged)
        _wait(dist.irecv(buffer, self.peer, group=self._host, tag=EXTRAS), f"data from rank {self.peer}")
        return buffer

    def place(self, layout: Layout, buffer: torch.Tensor) -> dict[str, Any]:
        """The message's values: views of the buffer, copies on the accelerator, tensors received straight into it."""
        values = layout.unpack(buffer, self._device)
        works = []
        for place in layout.device_places:
            with torch.inference_mode(False):
                tensor = values[place.name] = place.empty(self._device)
            works.append(dist.irecv(tensor, self.peer, group=self._device_group))
        for work in works:
            _wait(work, f"tensors from rank {self.peer}")  # on NCCL the stream waits, not the host
        return {name: values[name] for name in layout.names}


class ReceivedMessage:
    """A message on its way to this rank.

    Attributes:
        tensors: by name; empty until `wait` returns.
        done: whether it is there.
    """

    def __init__(
        self, receiver: Receiver, sequence: int, expected: Layout, buffer: torch.Tensor, work: dist.Work
    ) -> None:
        self.tensors: dict[str, Any] = {}
        self.done = False
        self._receiver, self._sequence, self._expected = receiver, sequence, expected
        self._buffer, self._work = buffer, work

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        """Wait for it, at most the group's timeout, and fill `tensors`; more calls do nothing."""
        self._receiver.read_up_to(self)

    def read(self, timeout: timedelta | None = None) -> None:
        """What `wait` does when it is this message's turn."""
        peer = self._receiver.peer
        _wait(self._work, f"message {self._sequence} from rank {peer}", timeout)
        magic, sequence, kind, description_bytes, host_bytes = (
            self._buffer[:HEADER_BYTES].view(torch.int64)[:5].tolist()
        )
        if magic != MAGIC or sequence != self._sequence:
            what = f"its message {sequence}" if magic == MAGIC else "something else"
            raise OutOfStepError(
                f"expected message {self._sequence} from rank {peer}, got {what}: the ranks did not make the same calls. "
                "All ranks must run the same denoising loop, with the same branches and steps."
            )
        layout = self._receiver.layout_after(sequence, kind, description_bytes, self._expected)
        if kind == EXPECTED:
            data = self._buffer[HEADER_BYTES:]
        else:
            data = self._receiver.extra(host_bytes, layout.staged) if host_bytes else self._buffer[:0]
        self.tensors.update(self._receiver.place(layout, data))
        self.done = True


def _packed(layout: Layout, tensors: Mapping[str, Any], start: int) -> torch.Tensor:
    buffer = _host_buffer(start + layout.host_bytes, layout.staged)
    layout.pack(tensors, buffer[start:])
    return buffer


def _host_buffer(size: int, staged: bool) -> torch.Tensor:
    """Memory of one message; pinned where tensors are copied to or from a GPU through it."""
    with torch.inference_mode(False):  # what is a view of it must be usable everywhere
        return torch.empty(size, dtype=torch.uint8, pin_memory=staged and torch.cuda.is_available())


def _write_header(buffer: torch.Tensor, sequence: int, kind: int, description_bytes: int, host_bytes: int) -> None:
    words = [MAGIC, sequence, kind, description_bytes, host_bytes, 0, 0, 0]
    buffer[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(words))


def _as_bytes(layout: Layout) -> bytes:
    return json.dumps([place.as_list() for place in layout.places]).encode()


def _from_bytes(text: torch.Tensor) -> Layout:
    return Layout(tuple(Place.from_list(values) for values in json.loads(bytes(text.tolist()))))


def _wait(work: dist.Work | None, text: str, timeout: timedelta | None = None) -> None:
    assert work is not None  # this rank is in the group
    try:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)
    except RuntimeError as error:
        error.add_note(f"while waiting for {text}")
        raise
