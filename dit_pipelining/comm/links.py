"""Process groups between stages, and from the last stage to everyone.

[Note: groups]
There is one group of two ranks for each directed link between neighbouring stages, and one group of all ranks of the line
for the results of each replica. All ranks of the launch make them in one order. A rank posts receives of a link from one
thread and sends of the next link from another, never both on one group: on NCCL, sends and receives of one group run one
after the other, so a receive that waits would hold up a send that the other side waits for (seen on two GPUs: it hangs).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.comm.host_memory import Post, Transfer, start_receive, start_send
from dit_pipelining.comm.mesh import Mesh, new_group

Work = dist.Work | Transfer
"""A transfer on its way: `wait` makes its data usable on the current stream."""


@dataclass(frozen=True)
class Link:
    """One direction between two ranks, over a process group of its own.

    Attributes:
        source, target: ranks of the launch.
        group: of the two.
        backend: "gloo" or "nccl".
    """

    source: int
    target: int
    group: dist.ProcessGroup
    backend: str

    def send(self, tensor: torch.Tensor) -> Work:
        """Post a send. The tensor must live until the work is waited for."""
        return _from(tensor, lambda own: dist.isend(own, self.target, group=self.group), self.backend)

    def receive(self, buffer: torch.Tensor) -> Work:
        """Post a receive of what the source sends, in its order."""
        return _into(buffer, lambda own: dist.irecv(own, self.source, group=self.group), self.backend)

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
        results: from the last stage to all ranks.
        backend: "gloo" or "nccl".
    """

    ranks: tuple[int, ...]
    hops: tuple[Link, ...]
    results: dist.ProcessGroup
    backend: str

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

        def post(own: torch.Tensor) -> dist.Work | None:
            return dist.broadcast(own, self.root, group=self.results, async_op=True)

        start = _from if dist.get_rank() == self.root else _into
        return [start(tensor, post, self.backend) for tensor in tensors]


def make_links(mesh: Mesh, timeout: timedelta, device: torch.device, backend: str = "gloo") -> list[ReplicaLinks]:
    """Make the groups of all replicas and warm each up with a real transfer; every rank of the mesh calls this."""

    def group(ranks: Sequence[int]) -> dist.ProcessGroup:
        return new_group(mesh.in_all_lines(ranks), timeout, backend, group_options(backend))

    def link(source: int, target: int) -> Link:
        return Link(mesh.line[source], mesh.line[target], group([source, target]), backend)

    links = []
    for replica in range(mesh.replicas):
        hops = tuple(link(one, other) for one, other in pairwise(mesh.ranks_of(replica)))
        links.append(ReplicaLinks(tuple(mesh.world_ranks_of(replica)), hops, group(range(mesh.size)), backend))
    for own in links:
        for hop in own.hops:  # first stage first: no rank waits for a receive before its own can be sent
            hop.warm_up(device)
        for work in own.share([torch.zeros(1, device=device)]):
            work.wait()
    return links


def group_options(backend: str) -> Any:
    """Waiting NCCL kernels take multiprocessors from the stages: few channels each (1.12x instead of 1.52x, two H200)."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 1
    return options


def _into(buffer: torch.Tensor, post: Post, backend: str) -> Work:
    return start_receive(buffer, post) if backend == "gloo" else _posted(post(buffer))


def _from(tensor: torch.Tensor, post: Post, backend: str) -> Work:
    return start_send(tensor, post) if backend == "gloo" else _posted(post(tensor))


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work
