"""DistributedKVCache: the rolling caches of a model's blocks, each on the rank whose stage runs the block."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from dit_pipelining.stream.cache import RollingKVCache
from dit_pipelining.stream.spec import StreamSpec


class DistributedKVCache:
    """The caches of the blocks that this rank's stage runs.

    `caches[block][stream][level]` of the literature: a RollingKVCache holds all streams and levels of its block.
    """

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.caches: dict[str, RollingKVCache] = {}

    def of(self, block: str) -> RollingKVCache:
        """The cache of a block, empty at first."""
        if block not in self.caches:
            self.caches[block] = RollingKVCache(self.spec)
        return self.caches[block]

    def change_levels(self, spec: StreamSpec, sources: Sequence[int]) -> None:
        """As `RollingKVCache.change_levels`, for all blocks."""
        self.spec = spec
        for cache in self.caches.values():
            cache.change_levels(spec, sources)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for cache in self.caches.values() for tensor in cache.tensors)

    def move(
        self,
        before: Mapping[str, int],
        after: Mapping[str, int],
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Give the caches of blocks that change hands to their new rank, pointers included; all ranks call this.

        Args:
            before: the stage of each block now.
            after: likewise, from now on.
            ranks: of the stages.
            group: of all ranks, over gloo.
            device: of this rank.
        """
        own = list(ranks).index(dist.get_rank())
        for block, source in before.items():
            target = after[block]
            if source == target:
                continue
            if own == source:
                _send(self.caches.pop(block), ranks[target], group)
            elif own == target:
                self.caches[block] = _receive(self.spec, ranks[source], group, device)


def _send(cache: RollingKVCache, target: int, group: dist.ProcessGroup) -> None:
    tensors = cache.tensors
    pointers = [(pointer.written, pointer.next_chunk) for pointer in cache.pointers]
    facts = ([(tuple(tensor.shape), tensor.dtype) for tensor in tensors], pointers)
    dist.send_object_list([facts], target, group=group)
    for tensor in tensors:
        if tensor.numel():
            dist.send(tensor.cpu().view(-1).view(torch.uint8), target, group=group)


def _receive(spec: StreamSpec, source: int, group: dist.ProcessGroup, device: torch.device) -> RollingKVCache:
    received: list[tuple[list[tuple[tuple[int, ...], torch.dtype]], list[tuple[int, int]]]] = [([], [])]
    dist.recv_object_list(received, source, group=group)
    layouts, pointers = received[0]
    tensors = []
    for shape, dtype in layouts:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), source, group=group)
        tensors.append(tensor.to(device))
    cache = RollingKVCache(spec)
    cache.restore(tensors, pointers)
    return cache
