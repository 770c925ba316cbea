"""Ranks that compute the calls of one component together: the tiles of a VAE, the parts of a text encoder.

[Note: teams]
One rank of a team leads: it owns the component in one line of ranks, and what a call gave goes from it to all others. The
owners in other lines of the same data-parallel copy, which make the same calls, belong to the team before ranks that do not
own the component, since they would otherwise hold all of it. All lead, help or hear at the same call of the pipeline, which
is where all ranks' order of calls meets, so none waits for another that is elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dit_pipelining.comm.layout import CALLERS, Layout
from dit_pipelining.comm.links import Work
from dit_pipelining.comm.mesh import Mesh, backend_of, new_group
from dit_pipelining.comm.packing import pack, tensor_in, unpack
from dit_pipelining.comm.sender_links import SenderLinks, make_link


@dataclass(frozen=True)
class Team:
    """Who has to do with one component; ranks of the launch.

    Attributes:
        compute: those that compute its calls together, the lead first.
        owners: of the component, one in each line of ranks that make the same calls, the lead first: it gives the others
            the result.
    """

    compute: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def lead(self) -> int:
        return self.compute[0]


def team_of(layout: Layout, rank: int, owner: int, size: int, *, towards: int) -> Team:
    """Choose a component's team: its owners in all lines, and then the ranks beside the first of them.

    Args:
        layout: of the launch.
        rank: one of those in question; ranks of other data-parallel copies have nothing to do with it.
        owner: of the component, as a rank within each line.
        size: number of ranks that compute.
        towards: 1: the ranks after the first owner; -1: those before it.
    """
    copy = layout.peers(rank, *CALLERS)
    owners = tuple(sorted({Mesh.of(layout, peer).line[owner] for peer in copy}))
    lead = copy.index(owners[0])
    beside = [copy[(lead + towards * i) % len(copy)] for i in range(1, len(copy))]
    others = [peer for peer in beside if peer not in owners]
    return Team((*owners, *others)[:size], owners)


@dataclass(frozen=True)
class TeamLinks:
    """How the ranks of a team talk.

    Attributes:
        helpers: by rank: from the lead to it, and back; on a helper, its own.
        owners: from the lead to the other owners; None where this rank is not one of several.
    """

    helpers: Mapping[int, tuple[SenderLinks, SenderLinks]]
    owners: SenderLinks | None


def make_team_links(team: Team, layout: Layout, device: torch.device, timeout: timedelta, transport: str) -> TeamLinks:
    """Make the groups; every rank of the launch calls this alike.

    Args:
        team: in this rank's data-parallel copy.
        layout: of the launch.
        device: of this rank.
        timeout: of the groups.
        transport: how data moves between the ranks, from `choose_transport`.
    """
    rank = dist.get_rank()
    helpers = {}
    for helper in team.compute[1:]:
        pair = (team.lead, helper)
        there, back = (make_link(source, pair, layout, device, timeout, transport) for source in pair)
        if rank in pair:
            helpers[helper] = (there, back)
    owners = make_link(team.lead, team.owners, layout, device, timeout, transport)
    return TeamLinks(helpers, owners if rank in team.owners and len(team.owners) > 1 else None)


def make_team_groups(
    teams: Mapping[str, Team], layout: Layout, device: torch.device, timeout: timedelta
) -> dict[str, dist.ProcessGroup]:
    """A group of the ranks of each team that compute, for collectives; every rank of the launch calls this alike.

    Args:
        teams: by component, in this rank's data-parallel copy. Teams of the same ranks have one group.
        layout: of the launch.
        device: of this rank.
        timeout: of a transfer.
    """
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for team in teams.values():
        if team.compute in made:
            continue
        alike = list(zip(*(layout.peers(rank, "data") for rank in team.compute), strict=True))
        group = made[team.compute] = new_group(alike, timeout, backend_of(device))
        if dist.get_rank() in team.compute:
            # NCCL joins the ranks here, not while stages run.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    return {name: made[team.compute] for name, team in teams.items()}


class TeamWork(Protocol):
    """How one rank takes part in the calls of a component that several compute together."""

    talk: "Talk"
    needs_all: bool
    """No rank can make a call by itself."""

    def run(self, call: Callable[[], Any]) -> Any:
        """On the lead: one call; what it gives or raises is what the component does."""

    def serve(self, call: Callable[[], Any]) -> None:
        """On another rank: take part in the lead's call until it has ended; at once where this rank does not help."""


class Talk:
    """What the ranks of a team tell each other.

    Args:
        team: that has to do with the component, this rank among them.
        links: between them.
        rank: of this process.
        device: of this process.
        watched: a context in which what goes wrong with a transfer ends the run.
    """

    def __init__(
        self,
        team: Team,
        links: TeamLinks,
        rank: int,
        device: torch.device,
        watched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.team = team
        self.links = links
        self.rank = rank
        self.device = device
        self.watched = watched

    @property
    def leads(self) -> bool:
        """Whether this rank leads."""
        return self.rank == self.team.lead

    @property
    def own(self) -> tuple[SenderLinks, SenderLinks] | None:
        """On a helper: from the lead to it, and back; None where this rank does not help."""
        return None if self.leads else self.links.helpers.get(self.rank)

    def tell_owners(self, message: Any, flats: Sequence[torch.Tensor]) -> list[Work]:
        """On the lead: post what a call gave to the owners in other lines of ranks."""
        link = self.links.owners
        return link.send(message, flats, link.everyone) if link is not None and self.leads else []

    def hear_lead(self) -> tuple[Any, list[torch.Tensor]]:
        """On an owner in another line of ranks: what the lead's call gave."""
        link = self.links.owners
        assert link is not None  # an owner that does not lead is one of several
        message = link.receive_header()
        parts = message["result"].parts if "result" in message else ()
        return message, link.receive(parts, link.everyone)

    def start(self, link: SenderLinks, value: Any) -> Any:
        """Begin to send a value; for `finish`."""
        packed, flats = pack(value)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        with self.watched():
            return link.send(packed, flats, link.everyone), flats

    def finish(self, started: Any) -> None:
        """Return when a value has been sent."""
        works, _ = started
        with self.watched():
            for work in works:
                work.wait()

    def send(self, link: SenderLinks, value: Any) -> None:
        """Send a value."""
        self.finish(self.start(link, value))

    def receive(self, link: SenderLinks) -> Any:
        """Wait for a value."""
        with self.watched():
            packed = link.receive_header()
            return unpack(packed, tensor_in(link.receive(packed.parts, link.everyone)))
