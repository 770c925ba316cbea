"""Process groups over which one rank, such as the owner of a component, tells the others what it computed.

[Note: order on the groups of components]
Each owner has groups of its own, in which it is the only one that sends. It posts what a call gave when the call has run;
the others take it when the calling request has its next turn. Turns are the same on every rank, so on each group sends and
receives come in one order, and the thread that posts is the one whose turn it is. With one group for all owners they would
not: while one rank has yet to take the first owner's result, it may have sent its own.

A result travels as a small header over gloo, and then as its tensors' bytes: over the device's own backend where they lie
on an accelerator. The header leaves when the data is there, so that no kernel waits on the receiving device.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.comm.layout import Layout
from dit_pipelining.comm.links import Wire, Work, group_options
from dit_pipelining.comm.mesh import Mesh, new_group
from dit_pipelining.comm.packing import Part


@dataclass(frozen=True)
class Audience:
    """Ranks that get a sender's tensors, the sender among them.

    Attributes:
        ranks: in order.
        host: what tensors take, over gloo; None where the sender is alone.
        device: what tensors on GPUs take where they have NCCL; None where they go through host memory.
    """

    ranks: tuple[int, ...]
    host: Wire | None
    device: Wire | None


@dataclass(frozen=True)
class SenderLinks:
    """How one rank's results get to others.

    Attributes:
        sender: the rank that computes.
        everyone: all that take part; headers go to all of them.
        outputs: the sender and those ranks that return what the pipeline made.
        device: of this rank.
    """

    sender: int
    everyone: Audience
    outputs: Audience
    device: torch.device

    def send(self, header: Any, flats: Sequence[torch.Tensor], audience: Audience) -> list[Work]:
        """Post a header to all ranks, and tensors of bytes to an audience. They must live until the works are done."""
        if self.everyone.host is None:
            return []  # a line of one rank
        data = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
        works = [self._start(tensor, self.everyone) for tensor in (torch.tensor([data.numel()]), data)]
        if audience.host is not None:
            works += [self._start(flat, audience) for flat in flats if flat.numel()]
        return works

    def receive_header(self) -> Any:
        """Wait for the next header."""
        size = torch.empty(1, dtype=torch.int64)
        self._start(size, self.everyone).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._start(data, self.everyone).wait()
        return pickle.loads(data.numpy().tobytes())

    def receive(self, parts: Sequence[Part], audience: Audience) -> list[torch.Tensor]:
        """Wait for the bytes that belong to the header received last."""
        devices = ["cpu" if part.device_type == "cpu" else self.device for part in parts]
        flats = [
            torch.empty(part.bytes, dtype=torch.uint8, device=device)
            for part, device in zip(parts, devices, strict=True)
        ]
        for work in [self._start(flat, audience) for flat in flats if flat.numel()]:
            work.wait()
        return flats

    def _start(self, tensor: torch.Tensor, audience: Audience) -> Work:
        wire = audience.host if tensor.device.type == "cpu" else audience.device or audience.host
        assert wire is not None  # a sender that is alone sends nothing
        return wire.broadcast(tensor, self.sender)


def make_sender_links(
    mesh: Mesh,
    owners: Sequence[int],
    output_ranks: Sequence[int],
    device: torch.device,
    timeout: timedelta,
    transport: str,
) -> dict[int, SenderLinks]:
    """Make the groups of all owners; every rank of the launch calls this alike.

    Args:
        mesh: the ranks that run the pipeline together.
        owners: ranks of the line that own components.
        output_ranks: those that return what the pipeline made.
        device: of this rank.
        timeout: of the groups.
        transport: how data moves between the ranks, from `choose_transport`.
    """
    links = {}
    for owner in sorted(set(owners)):
        everyone = _audience(mesh, range(mesh.size), timeout, transport)
        members = sorted({owner, *output_ranks})
        outputs = everyone if len(members) == mesh.size else _audience(mesh, members, timeout, transport)
        links[owner] = SenderLinks(mesh.line[owner], everyone, outputs, device)
        for audience in (everyone, outputs):
            _warm_up(audience, mesh.line[owner], device)
    return links


def make_link(
    source: int, ranks: Sequence[int], layout: Layout, device: torch.device, timeout: timedelta, transport: str
) -> SenderLinks:
    """Make a group in which one rank sends to the others; every rank of the launch calls this alike.

    Args:
        source: the rank that sends.
        ranks: all members, in one data-parallel copy; these ranks are those of the launch.
        layout: of the launch.
        device: of this rank.
        timeout: of the group.
        transport: how data moves between the ranks, from `choose_transport`.
    """
    alike = list(zip(*(layout.peers(rank, "data") for rank in sorted(ranks)), strict=True))
    audience = _audience_of(tuple(sorted(ranks)), alike, timeout, transport)
    _warm_up(audience, source, device)
    return SenderLinks(source, audience, audience, device)


def _warm_up(audience: Audience, source: int, device: torch.device) -> None:
    """No communicator is made while stages run."""
    if audience.device is not None and dist.get_rank() in audience.ranks:
        audience.device.broadcast(torch.zeros(1, device=device), source).wait()


def _audience(mesh: Mesh, ranks: Sequence[int], timeout: timedelta, transport: str) -> Audience:
    return _audience_of(tuple(mesh.line[rank] for rank in ranks), mesh.in_all_lines(ranks), timeout, transport)


def _audience_of(
    members: tuple[int, ...], alike: Sequence[Sequence[int]], timeout: timedelta, transport: str
) -> Audience:
    if len(members) == 1:
        return Audience(members, None, None)
    host, device = Wire(new_group(alike, timeout)), None
    if transport != "host":
        device = Wire(new_group(alike, timeout, "nccl", group_options("nccl")), "nccl")
    return Audience(members, host, device)
