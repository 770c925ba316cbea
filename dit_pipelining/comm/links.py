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
class ReplicaLinks:
    """How the ranks of one replica pass data on.

    Attributes:
        ranks: of the replica, in the order of its stages.
        hops: `hops[i]` leads from stage i to stage i + 1.
        results: from the last stage to all ranks.
        backend: "gloo" or "nccl".
    """

    ranks: tuple[int, ...]
    hops: tuple[dist.ProcessGroup, ...]
    results: dist.ProcessGroup
    backend: str

    @property
    def root(self) -> int:
        """The rank whose stage gives the result."""
        return self.ranks[-1]

    def receive(self, stage: int, buffers: Sequence[torch.Tensor]) -> list[Work]:
        """Post the receives of what the stage before `stage` sends, in its order."""
        source, group = self.ranks[stage - 1], self.hops[stage - 1]
        return [self._into(buffer, lambda own: dist.irecv(own, source, group=group)) for buffer in buffers]

    def send(self, stage: int, tensors: Sequence[torch.Tensor]) -> list[Work]:
        """Post the sends from `stage` to the next one. The tensors must live until the works are waited for."""
        target, group = self.ranks[stage + 1], self.hops[stage]
        return [self._from(tensor, lambda own: dist.isend(own, target, group=group)) for tensor in tensors]

    def share(self, tensors: Sequence[torch.Tensor]) -> list[Work]:
        """Post the broadcast of a result: from the root's tensors into the others'."""

        def post(own: torch.Tensor) -> dist.Work | None:
            return dist.broadcast(own, self.root, group=self.results, async_op=True)

        start = self._from if dist.get_rank() == self.root else self._into
        return [start(tensor, post) for tensor in tensors]

    def _into(self, buffer: torch.Tensor, post: Post) -> Work:
        return start_receive(buffer, post) if self.backend == "gloo" else _posted(post(buffer))

    def _from(self, tensor: torch.Tensor, post: Post) -> Work:
        return start_send(tensor, post) if self.backend == "gloo" else _posted(post(tensor))


def make_links(mesh: Mesh, timeout: timedelta, device: torch.device, backend: str = "gloo") -> list[ReplicaLinks]:
    """Make the groups of all replicas and warm each up with a real transfer; every rank of the mesh calls this."""

    def group(ranks: Sequence[int]) -> dist.ProcessGroup:
        return new_group(mesh.in_all_lines(ranks), timeout, backend, group_options(backend))

    links = []
    for replica in range(mesh.replicas):
        hops = tuple(group([one, other]) for one, other in pairwise(mesh.ranks_of(replica)))
        links.append(ReplicaLinks(tuple(mesh.world_ranks_of(replica)), hops, group(range(mesh.size)), backend))
    for replica, own in enumerate(links):
        probe = torch.zeros(1, device=device)
        if replica == mesh.replica:
            # First stage first: no rank waits for a receive before its own can be sent.
            if mesh.stage:
                _wait(own.receive(mesh.stage, [probe]))
            if mesh.stage < mesh.pipeline_size - 1:
                _wait(own.send(mesh.stage, [probe]))
        _wait(own.share([probe]))
    return links


def group_options(backend: str) -> Any:
    """Waiting NCCL kernels take multiprocessors from the stages: few channels each (1.12x instead of 1.52x, two H200)."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 1
    return options


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
