"""Process groups between stages, and from the last stage to everyone.

[Note: groups]
There is one group of two ranks for each directed link between neighbouring stages, and one group of all ranks of the line
for the results of each replica; where tensors take NCCL, a second one of the same ranks. All ranks of the launch make them
in one order. Receives from one neighbour and sends to the other are never on one group: on NCCL, sends and receives of one
group run one after the other, so a receive that waits would hold up a send that the other side waits for (seen on two GPUs:
it hangs).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.comm.courier import Courier, Delivery, GroupPost
from dit_pipelining.comm.host_memory import Transfer, start_receive, start_send
from dit_pipelining.comm.mesh import Mesh, new_group
from dit_pipelining.comm.works import started

Work = dist.Work | Transfer | Delivery
"""A transfer on its way: `wait` makes its data usable on the current stream."""


@dataclass(frozen=True)
class Wire:
    """What the tensors of some ranks take.

    Attributes:
        group: of the ranks.
        backend: of the group. "gloo": tensors of GPUs go through pinned host memory. "nccl": both sides know already that
            there is something to transfer.
        courier: where they do not: it tells them over the group, which is of gloo, and has an NCCL group of its own.
    """

    group: dist.ProcessGroup
    backend: str = "gloo"
    courier: Courier | None = None

    def send(self, tensor: torch.Tensor, post: GroupPost) -> Work:
        """Start this rank's side, by `post`, of a transfer of its tensor, which must live until the work is waited for."""
        if self.courier is not None:
            return self.courier.send(tensor, post)
        if self.backend == "gloo":
            return start_send(tensor, self._on_group(post))
        return started(post(tensor, self.group))

    def receive(self, buffer: torch.Tensor, post: GroupPost) -> Work:
        """Start this rank's side of a transfer into a buffer."""
        if self.courier is not None:
            return self.courier.receive(buffer, post)
        if self.backend == "gloo":
            return start_receive(buffer, self._on_group(post))
        return started(post(buffer, self.group))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Start this rank's side of a transfer from the root's tensor into those of all other ranks."""
        start = self.send if dist.get_rank() == root else self.receive
        return start(tensor, lambda own, group: dist.broadcast(own, root, group=group, async_op=True))

    def _on_group(self, post: GroupPost) -> Any:
        return lambda own: post(own, self.group)


@dataclass(frozen=True)
class Link:
    """One direction between two ranks, over a wire of its own.

    Attributes:
        source, target: ranks of the launch.
        wire: between the two.
    """

    source: int
    target: int
    wire: Wire

    def send(self, tensor: torch.Tensor) -> Work:
        """Post a send. The tensor must live until the work is waited for."""
        return self.wire.send(tensor, lambda own, group: dist.isend(own, self.target, group=group))

    def receive(self, buffer: torch.Tensor) -> Work:
        """Post a receive of what the source sends, in its order."""
        return self.wire.receive(buffer, lambda own, group: dist.irecv(own, self.source, group=group))

    def warm_up(self, device: torch.device) -> None:
        """A first transfer: what NCCL makes for it would else hold up the GPU in the middle of the work."""
        probe = torch.zeros(1, device=device)
        if dist.get_rank() == self.source:
            self.send(probe).wait()
        elif dist.get_rank() == self.target:
            self.receive(probe).wait()


@dataclass(frozen=True)
class ReplicaLinks:
    """How the ranks of one replica pass data on.

    Attributes:
        ranks: of the replica, in the order of its stages.
        hops: `hops[i]` leads from stage i to stage i + 1.
        results: from the last stage to all ranks of the line.
    """

    ranks: tuple[int, ...]
    hops: tuple[Link, ...]
    results: Wire

    @property
    def root(self) -> int:
        """The rank whose stage gives the result."""
        return self.ranks[-1]

    def receive(self, stage: int, buffers: Sequence[torch.Tensor]) -> list[Work]:
        """Post the receives of what the stage before `stage` sends, in its order."""
        return [self.hops[stage - 1].receive(buffer) for buffer in buffers]

    def send(self, stage: int, tensors: Sequence[torch.Tensor]) -> list[Work]:
        """Post the sends from `stage` to the next one. The tensors must live until the works are waited for."""
        return [self.hops[stage].send(tensor) for tensor in tensors]

    def share(self, tensors: Sequence[torch.Tensor]) -> list[Work]:
        """Post the broadcast of a result: from the root's tensors into the others'."""
        return [self.results.broadcast(tensor, self.root) for tensor in tensors]


def make_links(mesh: Mesh, timeout: timedelta, device: torch.device, data: str | None = None) -> list[ReplicaLinks]:
    """Make the groups of all replicas and warm each up with a real transfer; every rank of the mesh calls this.

    Args:
        mesh: of this rank.
        timeout: of each wait.
        device: of this rank.
        data: backend of groups of their own for the tensors, such as `"nccl"`; None: they take gloo like the rest.
    """

    def wire(ranks: Sequence[int]) -> Wire:
        alike = mesh.in_all_lines(ranks)
        group = new_group(alike, timeout)
        if data is None:
            return Wire(group)
        return Wire(group, courier=Courier(group, new_group(alike, timeout, data, group_options(data)), device))

    def link(source: int, target: int) -> Link:
        return Link(mesh.line[source], mesh.line[target], wire([source, target]))

    links = []
    for replica in range(mesh.replicas):
        hops = tuple(link(one, other) for one, other in pairwise(mesh.ranks_of(replica)))
        links.append(ReplicaLinks(tuple(mesh.world_ranks_of(replica)), hops, wire(range(mesh.size))))
    for own in links:
        for hop in own.hops:  # first stage first: no rank waits for a receive before its own can be sent
            hop.warm_up(device)
        for work in own.share([torch.zeros(1, device=device)]):
            work.wait()
    return links


def group_options(backend: str) -> Any:
    """NCCL kernels take multiprocessors from the stages: few channels each (1.12x instead of 1.52x, two H200)."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 1
    return options
