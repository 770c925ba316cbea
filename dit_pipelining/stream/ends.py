"""Ends: where a rank's messages leave and arrive during one run of a stream."""

import torch

from dit_pipelining.comm.message_link import Direction, Receiver, Sender, receive_one
from dit_pipelining.stream.head import given_streams
from dit_pipelining.stream.layouts import Layouts
from dit_pipelining.stream.links import StreamLinks
from dit_pipelining.stream.micro_step import Header, Kind, MicroStep, decode, encode
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.stage import StreamStage


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
        self._senders: list[Sender] = []
        self._receivers: list[Receiver] = []

    def header(self, kind: Kind) -> torch.Tensor:
        """The header of a message that is nothing else."""
        return encode(Header(kind), self.length)

    def sender(self, direction: Direction) -> Sender:
        self._senders.append(Sender(direction, self.stage.device))
        return self._senders[-1]

    def receiver(self, direction: Direction) -> Receiver:
        """An end where messages arrive until the last one, which must come before `close`."""
        layouts = Layouts(self.stage, self.noise)
        ways = {
            id(self.links.back): layouts.returned,
            id(self.links.twin): layouts.rows,
            id(self.links.flow): layouts.flow,
        }
        way = ways.get(id(direction), layouts.hop)
        end = float(Kind.END)
        self._receivers.append(
            Receiver(
                direction, self.stage.device, self.length, way, lambda header: float(header[0]) == end, self.seconds
            )
        )
        return self._receivers[-1]

    def fresh(self, step: MicroStep) -> list[tuple[int, torch.Tensor]]:
        """What sources gave for first passes in this step, by stream; on the last rank."""
        streams = given_streams(step)
        if not streams:
            return []
        assert self.links.fresh is not None
        layout = ((len(streams), *self.noise.shape[1:]), self.noise.dtype)
        (latents,) = receive_one(self.links.fresh, self.length, [layout], self.stage.device)
        return list(zip(streams, latents.split(1), strict=True))

    def close(self) -> None:
        """Wait until everything is sent and the last messages have come."""
        for sender in self._senders:
            sender.close()
        for receiver in self._receivers:
            receiver.close()
        self._senders, self._receivers = [], []


def until_the_end(receiver: Receiver) -> None:
    """Take messages until the last one."""
    kind = Kind.IDLE
    while kind is not Kind.END:
        with receiver.next() as message:
            kind = decode(message.header).kind
