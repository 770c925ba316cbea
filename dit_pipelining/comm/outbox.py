"""Where messages wait until a copy engine has taken them."""

from collections.abc import Sequence

import torch

from dit_pipelining.comm.peer_channels import SLOTS


class Outbox:
    """Buffers on the source of a channel, one for each slot at its target.

    What a stage gave is free as soon as it was copied here. Else it would be held until it has been sent, and a host that is
    many calls ahead of its GPU would hold as many of them.
    """

    def __init__(self) -> None:
        self._buffers: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]
        self._sent: list[torch.cuda.Event | None] = [None] * SLOTS
        self._place = 0

    def put(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> list[torch.Tensor]:
        """Copy tensors on `stream`, which is the current one, once what was here before has been sent.

        Returns:
            the copies, contiguous.
        """
        place = self._place
        if (sent := self._sent[place]) is not None:
            stream.wait_event(sent)
        buffers = self._buffers[place]
        if [(own.shape, own.dtype) for own in buffers] != [(tensor.shape, tensor.dtype) for tensor in tensors]:
            buffers = self._buffers[place] = [tensor.new_empty(tensor.shape) for tensor in tensors]
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        return buffers

    def sent(self, event: torch.cuda.Event) -> None:
        """The copies that `put` gave last are free after `event`."""
        self._sent[self._place] = event
        self._place = (self._place + 1) % SLOTS
