"""The ranks that share the tokens of a call."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.comm.layout import Layout
from dit_pipelining.comm.mesh import backend_of, new_group
from dit_pipelining.errors import ConfigError
from dit_pipelining.torch_internals import all_gather, all_to_all


@dataclass(frozen=True, eq=False)
class SequenceGroups:
    """Ranks with the same stage of the same call, each with its part of the tokens: `ring` x `ulysses` of them.

    Attributes:
        ring: ranks among which keys and values are gathered; None: one rank.
        ulysses: ranks among which heads are exchanged for tokens; None: one rank.
        tokens: all of them, ulysses innermost: rank i has the i-th part of the tokens.
        hosts: the same ranks over gloo, for what the hosts tell each other.
    """

    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None
    tokens: dist.ProcessGroup
    hosts: dist.ProcessGroup

    @property
    def ring_degree(self) -> int:
        return self.ring.size() if self.ring is not None else 1

    @property
    def ulysses_degree(self) -> int:
        return self.ulysses.size() if self.ulysses is not None else 1

    @property
    def size(self) -> int:
        """Into how many parts tokens are split."""
        return self.tokens.size()

    @property
    def rank(self) -> int:
        """Which part this rank has."""
        return self.tokens.rank()


def make_sequence_groups(layout: Layout, rank: int, device: torch.device, timeout: timedelta) -> SequenceGroups:
    """The groups of a rank; all ranks of the launch call this at the same point.

    Args:
        layout: of all ranks of the launch.
        rank: this one.
        device: of this rank.
        timeout: of a transfer.

    Raises:
        ConfigError: ranks share a GPU.
    """

    def make(*dimensions: str) -> dist.ProcessGroup | None:
        if len(layout.peers(rank, *dimensions)) == 1:
            return None
        return new_group(layout.groups(*dimensions), timeout, backend_of(device))

    ring, ulysses = make("ring"), make("ulysses")
    tokens = (make("ring", "ulysses") if ring is not None and ulysses is not None else ring) or ulysses
    assert tokens is not None
    hosts = new_group(layout.groups("ring", "ulysses"), timeout)
    if device.type == "cuda":
        _refuse_shared_gpus(device, hosts)
    for group in (ring, ulysses, tokens):
        if group is not None and device.type == "cuda":  # communicators are made here, never between two stages
            all_gather(torch.zeros(1, device=device), group)
    return SequenceGroups(ring, ulysses, tokens, hosts)


def _refuse_shared_gpus(device: torch.device, hosts: dist.ProcessGroup) -> None:
    places: list[Any] = [None] * hosts.size()
    dist.all_gather_object(places, str(torch.cuda.get_device_properties(device).uuid), group=hosts)
    if len(set(places)) < len(places):
        raise ConfigError(
            "ranks that share the tokens of a call also share a GPU, over which NCCL cannot work. Give each rank a GPU of its "
            "own, or leave out ulysses_degree and ring_degree."
        )


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """The sizes of nearly equal parts, the larger ones first, as `tensor_split` cuts them."""
    base, longer = divmod(total, parts)
    return tuple(base + (part < longer) for part in range(parts))


def exchange_sizes(groups: SequenceGroups, *own: int) -> list[list[int]]:
    """For each number of this rank, that of every rank in the order of the parts; the hosts wait for each other."""
    mine = torch.tensor(own, device="cpu")
    gathered = [torch.empty_like(mine) for _ in range(groups.size)]
    dist.all_gather(gathered, mine, group=groups.hosts)
    return [list(column) for column in zip(*(theirs.tolist() for theirs in gathered), strict=True)]


def gather_parts(tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Join the parts that the ranks of a group have.

    Args:
        tensor: this rank's part.
        dim: along which the parts lie.
        sizes: of all parts along it, in the order of the ranks.
        group: of these ranks.
    """
    longest = max(sizes)
    moved = tensor.movedim(dim, 0)
    if len(moved) < longest:
        moved = torch.cat([moved, moved.new_zeros(longest - len(moved), *moved.shape[1:])])
    as_bytes = moved.dtype is torch.bool  # gloo has no booleans
    gathered = all_gather((moved.byte() if as_bytes else moved).contiguous(), group)
    parts = [part[:size] for part, size in zip(gathered.chunk(len(sizes)), sizes, strict=True)]
    joined = torch.cat(parts).movedim(0, dim)
    return joined.bool() if as_bytes else joined


def exchange_parts(
    tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send a run of elements to each rank of a group, and get one of each.

    Args:
        tensor: one-dimensional, what goes to each rank one after the other.
        sent: elements for each rank.
        received: elements of each rank.
        group: of these ranks.
    """
    return all_to_all(tensor.contiguous(), list(received), list(sent), group)
