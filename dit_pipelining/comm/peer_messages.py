"""Messages whose tensors take a channel of peer copies: the hosts tell each other what comes, the GPUs wait for it.

See [Note: messages] in messages.py and [Note: peer copies] in peer_channels.py.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dit_pipelining.comm.cuda_streams import new_stream
from dit_pipelining.comm.messages import Direction, Form, Message, Receiver
from dit_pipelining.comm.peer_channels import Channel
from dit_pipelining.comm.sends import Sends


class PeerSender:
    """The end of a channel that messages are sent from.

    Args:
        direction: this rank is its source.
        channel: that the tensors take.
        device: of the tensors.
    """

    def __init__(self, direction: Direction, channel: Channel, device: torch.device) -> None:
        self.direction = direction
        self.channel = channel
        self.device = device
        self._stream = new_stream(device, priority=-1)
        self._headers = Sends()
        self._copied: deque[tuple[Any, list[torch.Tensor]]] = deque()

    def send(self, header: torch.Tensor, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message; the tensors must not be written into afterwards."""
        if tensors:
            sent = [tensor.contiguous() for tensor in tensors]
            self._stream.wait_event(torch.cuda.current_stream(self.device).record_event())
            with torch.cuda.stream(self._stream):
                self.channel.send(sent, self._stream)
            self._copied.append((self._stream.record_event(), sent))
        while self._copied and self._copied[0][0].query():
            self._copied.popleft()
        self._headers.keep(self.direction.send_header(header), header)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._headers.finish()
        while self._copied:
            self._copied.popleft()[0].synchronize()


class PeerReceiver(Receiver):
    """The end of a channel where messages arrive."""

    def __init__(
        self, direction: Direction, channel: Channel, device: torch.device, form: Form, seconds: float
    ) -> None:
        self.channel = channel
        super().__init__(direction, device, form, seconds)

    @contextmanager
    def next(self) -> Iterator[Message]:
        """The next message; its tensors are valid inside the context, for work given to the current stream.

        Raises:
            TimeoutError: none came in time.
        """
        message = self.take()
        layouts, stream = self.form.layouts(message.header), torch.cuda.current_stream(self.device)
        if layouts:
            message.tensors.extend(self.channel.receive(layouts, stream))
        yield message
        if layouts:
            self.channel.release(stream)
