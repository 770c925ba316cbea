"""Ends: where a rank's messages leave and arrive during one run of a stream."""

import torch

from dit_pipelining.comm.group_messages import GroupReceiver, GroupSender
from dit_pipelining.comm.messages import Direction, Form
from dit_pipelining.comm.peer_channels import Channel
from dit_pipelining.comm.peer_messages import PeerReceiver, PeerSender
from dit_pipelining.stream.layouts import Layouts
from dit_pipelining.stream.links import StreamLinks
from dit_pipelining.stream.micro_step import Header, Kind, decode, encode
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.stage import StreamStage

AnySender = GroupSender | PeerSender
AnyReceiver = GroupReceiver | PeerReceiver


class Ends:
    """The ends of the directions that a rank uses.

    Args:
        links: of this rank's pipeline.
        stage: of this rank.
        noise: shaped and typed as latents are.
        length: numbers in a header.
        seconds: how long to wait for a message.
    """

    def __init__(self, links: StreamLinks, stage: StreamStage, noise: NoiseSource, length: int, seconds: float) -> None:
        self.links = links
        self.stage = stage
        self.noise = noise
        self.length = length
        self.seconds = seconds
        self._senders: list[AnySender] = []
        self._receivers: list[AnyReceiver] = []

    def header(self, kind: Kind) -> torch.Tensor:
        """The header of a message that is nothing else."""
        return encode(Header(kind), self.length)

    def sender(self, direction: Direction) -> AnySender:
        """An end where messages leave."""
        data, device = direction.data, self.stage.device
        assert data is not None
        if isinstance(data, Channel):
            self._senders.append(PeerSender(direction, data, device))
        else:
            self._senders.append(GroupSender(direction, data, device))
        return self._senders[-1]

    def receiver(self, direction: Direction) -> AnyReceiver:
        """An end where messages arrive until the last one, which must come before `close`."""
        layouts = Layouts(self.stage, self.noise)
        ways = {
            id(self.links.back): layouts.returned,
            id(self.links.fresh): layouts.fresh,
            id(self.links.twin): layouts.rows,
            id(self.links.flow): layouts.flow,
        }
        way = ways.get(id(direction), layouts.hop)
        data, device, end = direction.data, self.stage.device, float(Kind.END)
        assert data is not None
        form = Form(self.length, way, lambda header: float(header[0]) == end)
        if isinstance(data, Channel):
            self._receivers.append(PeerReceiver(direction, data, device, form, self.seconds))
        else:
            self._receivers.append(GroupReceiver(direction, data, device, form, self.seconds))
        return self._receivers[-1]

    def close(self) -> None:
        """Wait until everything is sent and the last messages have come."""
        for sender in self._senders:
            sender.close()
        for receiver in self._receivers:
            receiver.close()
        self._senders, self._receivers = [], []


def until_the_end(receiver: AnyReceiver) -> None:
    """Take messages until the last one."""
    kind = Kind.IDLE
    while kind is not Kind.END:
        with receiver.next() as message:
            kind = decode(message.header).kind
