"""A group of ranks, and how tensors move between them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.mixins.messages import Counter, ReceivedMessage, Receiver, Sender, SentMessage


class GroupCoordinator:
    """The group of this rank among groups that are made together: pipelines, ranks of one CFG group, ...

    Every rank must make it, with the same arguments but `local_rank`. Ranks that the methods take are places in the group,
    from 0 to `world_size` - 1.

    Args:
        group_ranks: ranks of each group, in the group's order; each rank is in one of them.
        local_rank: number of this rank on its machine, for its device.
        backend: `"nccl"` or `"gloo"`. With gloo, tensors on a GPU go through host memory.
        timeout: of each wait.
        ring: whether ranks send to the next rank of the group, and the last to the first. On NCCL each direction then gets
            a group of its own: sends and receives of one group run one after the other, and would wait for each other.

    Attributes:
        rank: of this process, in the default group.
        ranks: of this group, in the default group.
        world_size: number of ranks of this group.
        rank_in_group: this rank's place.
        device: where this rank's tensors are.
        cpu_group: gloo.
        device_group: of the backend.
        sent: how many transfers this rank has posted to others of the group.
    """

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        backend: str,
        timeout: timedelta,
        *,
        ring: bool = False,
    ) -> None:
        self.rank = dist.get_rank()
        self.local_rank = local_rank
        self.device = local_device(local_rank)
        self.sent = Counter()
        self._timeout = timeout
        self._made: list[dist.ProcessGroup] = []
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        for ranks in group_ranks:
            cpu_group = self._new_group(ranks, "gloo")
            device_group = cpu_group if backend == "gloo" else self._new_group(ranks, backend)
            hops = [*pairwise(ranks), (ranks[-1], ranks[0])] if ring and backend != "gloo" and len(ranks) > 1 else []
            links = {hop: self._new_group(hop, backend) for hop in hops}
            if self.rank in ranks:
                self.ranks, self.cpu_group, self.device_group, self._links = list(ranks), cpu_group, device_group, links
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.rank)
        self._direct = backend != "gloo"
        self._warm_up()
        self.barrier()  # a rank that ends its groups at once would end those that others are still connecting to

    @property
    def first_rank(self) -> int:
        """The first rank of the group, in the default group."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """The last rank of the group, in the default group."""
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def next_rank(self) -> int:
        """The rank after this one, in the default group; after the last comes the first."""
        return self.ranks[self._neighbour(1)]

    @property
    def prev_rank(self) -> int:
        """The rank before this one, in the default group."""
        return self.ranks[self._neighbour(-1)]

    def isend_tensor_dict(self, tensor_dict: dict[str, Any], dst: int | None = None) -> list[SentMessage]:
        """Post a message to another rank of the group.

        Args:
            tensor_dict: tensors by name; also None, bools, numbers and texts.
            dst: default: the next rank.

        Returns:
            what to wait for before changing tensors on GPUs of a NCCL group; tensors elsewhere are copied at once.
        """
        if self.world_size == 1:
            return []
        return [self._sender(self._neighbour(1) if dst is None else dst).send(tensor_dict)]

    def irecv_tensor_dict(
        self, src: int | None = None
    ) -> tuple[dict[str, Any], list[ReceivedMessage], list[Callable[[], Any]]]:
        """Post the receive of the next message from another rank of the group.

        Args:
            src: default: the rank before.

        Returns:
            a dictionary that is empty until the handle is waited for, the handle, and steps to take after it (none).
        """
        if self.world_size == 1:
            return {}, [], []
        message = self._receiver(self._neighbour(-1) if src is None else src).receive()
        return message.tensors, [message], []

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int | None = None) -> None:
        """Send a message and wait until it is on its way."""
        for handle in self.isend_tensor_dict(tensor_dict, dst):
            handle.wait()

    def recv_tensor_dict(self, src: int | None = None) -> dict[str, Any]:
        """Receive the next message and wait for it."""
        tensors, handles, _ = self.irecv_tensor_dict(src)
        for handle in handles:
            handle.wait()
        return tensors

    def all_gather(
        self, input_: torch.Tensor, dim: int = 0, separate_tensors: bool = False
    ) -> torch.Tensor | list[torch.Tensor]:
        """Each rank's tensor, on every rank.

        Args:
            input_: of one shape and dtype on all ranks.
            dim: along which they are joined.
            separate_tensors: give a list, in the order of the ranks, instead.
        """
        if self.world_size == 1:
            return [input_] if separate_tensors else input_
        own = self._sendable(input_)
        gathered = [torch.empty_like(own) for _ in self.ranks]
        dist.all_gather(gathered, own, group=self.device_group)
        tensors = [tensor.to(input_.device) for tensor in gathered]
        return tensors if separate_tensors else torch.cat(tensors, dim)

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """The tensor of rank `src`, on every rank: written into `input_` where it is contiguous."""
        if self.world_size == 1:
            return input_
        buffer = self._sendable(input_)
        dist.broadcast(buffer, self.ranks[src], group=self.device_group)
        return buffer.to(input_.device)

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        if self.world_size > 1:
            dist.monitored_barrier(self.cpu_group, timeout=self._timeout)

    def destroy(self) -> None:
        """Give the process groups back, when what is under way has arrived or, after an error, cannot any more."""
        with suppress(RuntimeError):
            for receiver in self._receivers.values():
                receiver.finish()
            for sender in self._senders.values():
                sender.finish()
        for group in self._made:
            dist.destroy_process_group(group)
        self._made = []

    def _neighbour(self, step: int) -> int:
        return (self.rank_in_group + step) % self.world_size

    def _new_group(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), timeout=self._timeout, backend=backend)
        if self.rank in ranks:
            self._made.append(group)
        return group

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a collective of the backend takes: contiguous, and in host memory for gloo."""
        return tensor.detach().contiguous() if self._direct else tensor.detach().cpu().contiguous()

    def _direction(self, source: int, target: int) -> dist.ProcessGroup | None:
        if not self._direct:
            return None
        return self._links.get((self.ranks[source], self.ranks[target]), self.device_group)

    def _sender(self, dst: int) -> Sender:
        if dst not in self._senders:
            self._check(dst, "send to")
            group = self._direction(self.rank_in_group, dst)
            self._senders[dst] = Sender(self.ranks[dst], self.cpu_group, group, self.sent)
        return self._senders[dst]

    def _receiver(self, src: int) -> Receiver:
        if src not in self._receivers:
            self._check(src, "receive from")
            group = self._direction(src, self.rank_in_group)
            self._receivers[src] = Receiver(self.ranks[src], self.cpu_group, group, self.device)
        return self._receivers[src]

    def _check(self, other: int, what: str) -> None:
        if not 0 <= other < self.world_size or other == self.rank_in_group:
            raise ValueError(
                f"rank {self.rank_in_group} of a group of {self.world_size} cannot {what} rank {other}; dst and src are "
                f"places in the group, from 0 to {self.world_size - 1}, other than its own"
            )

    def _warm_up(self) -> None:
        """Connect NCCL's groups now and in one order; connecting in the loop could wait for a rank that waits for this one."""
        if not self._direct or self.world_size == 1:
            return
        probe = torch.zeros(1, device=self.device)
        self.all_gather(probe, separate_tensors=True)
        for (source, target), group in self._links.items():
            if self.rank == source:
                dist.send(probe, target, group=group)
            elif self.rank == target:
                dist.recv(probe, source, group=group)
        torch.accelerator.synchronize()


def local_device(local_rank: int) -> torch.device:
    """The device of a rank: the GPU with its local number, counted around where ranks share GPUs, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())
