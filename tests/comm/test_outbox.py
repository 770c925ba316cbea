"""Messages are copied into buffers that are used again once they have been sent."""

from typing import Any

import torch

from dit_pipelining.comm.outbox import Outbox
from dit_pipelining.comm.peer_channels import SLOTS


class Waits:
    """A stream that notes what it was told to wait for."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.events.append(event)


def test_buffers_are_used_again_after_the_send_that_read_them() -> None:
    outbox, stream = Outbox(), Waits()
    given = []
    for number in range(3 * SLOTS):
        own: Any = stream
        (copy,) = outbox.put([torch.full((2, 3), number).T], own)
        assert torch.equal(copy, torch.full((3, 2), number))
        assert copy.is_contiguous()
        event: Any = f"message {number} was sent"
        outbox.sent(event)
        given.append(copy.data_ptr())
    assert len(set(given)) == SLOTS
    assert stream.events == [f"message {number} was sent" for number in range(2 * SLOTS)]


def test_messages_of_another_layout_get_buffers_of_their_own() -> None:
    outbox, stream = Outbox(), Waits()
    own: Any = stream
    for message in ([torch.ones(4)], [torch.ones(2, dtype=torch.bfloat16), torch.zeros(1)], []) * 3:
        copies = outbox.put(message, own)
        event: Any = None
        outbox.sent(event)
        assert [copy.tolist() for copy in copies] == [tensor.tolist() for tensor in message]
