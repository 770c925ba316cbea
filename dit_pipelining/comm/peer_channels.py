"""Channels between ranks that have a GPU each on one host: the copy engines move the data, streams wait for counters.

[Note: peer copies]
A channel leads from one rank to another: two slots in the target's memory that the source copies into, a counter there of
what has arrived, and a counter at the source of what was taken out. The source's stream waits until a slot is free, copies,
and counts up; the target's stream waits for the count, uses the slot, and counts up at the source. No kernel spins
meanwhile, no host waits, and no host message is needed.

Why nothing can deadlock, whatever hardware queue a stream shares: every rank gives its GPU the work of call k = 0, 1, ... in
the order of the calls, which is the same on all ranks, and a wait of call k is for work of call k or earlier ones, which
was given to the other GPU before. So the smallest unfinished call can always go on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dit_pipelining.comm.cuda_streams import current_context, enter_context, new_stream, wait_value, write_value
from dit_pipelining.comm.peer_memory import PeerMemory

SLOTS = 2
"""Messages of a channel that may lie at the target: one in use, one arriving."""

ALIGNMENT = 256
"""Of the tensors of a message, in bytes: what kernels for aligned data ask for."""

COUNTER_BYTES = 64

RELEASED = 1 << 30
"""Added to a counter that nobody will count up any more, so that waits for it end."""


def aligned(size: int) -> int:
    """Bytes up to where the next tensor may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def slot_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a slot that holds tensors of these sizes in bytes."""
    return sum(aligned(size) for size in sizes)


@dataclass
class Channel:
    """One direction between two ranks, as both see it.

    Attributes:
        source, target: ranks.
        slots: byte offset of the first slot in the target's memory.
        capacity: bytes of a slot.
        arrived: byte offset of the counter of messages in the target's memory.
        taken: byte offset of the counter of messages taken out in the source's memory.
        count: messages that this rank has sent or received.
    """

    memory: PeerMemory
    source: int
    target: int
    slots: int
    capacity: int
    arrived: int
    taken: int
    count: int = 0

    def send(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
        """Copy contiguous tensors to the target, on `stream`, which is the current one."""
        if (size := slot_bytes([tensor.nbytes for tensor in tensors])) > self.capacity:
            raise ValueError(f"a message of {size} bytes does not fit into a slot of {self.capacity} bytes")
        self.count += 1
        if self.count > SLOTS:
            wait_value(stream, self.memory.address(self.source, self.taken), self.count - SLOTS)
        offset = self._slot()
        for tensor in tensors:
            self.memory.view(self.target, offset, tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
            offset += aligned(tensor.nbytes)
        write_value(stream, self.memory.address(self.target, self.arrived), self.count)

    def receive(
        self, layouts: Sequence[tuple[Sequence[int], torch.dtype]], stream: torch.cuda.Stream
    ) -> list[torch.Tensor]:
        """Let `stream` wait for the next message.

        Returns:
            its tensors, which lie in the slot and are valid on `stream` until `release`.
        """
        self.count += 1
        wait_value(stream, self.memory.address(self.target, self.arrived), self.count)
        offset, tensors = self._slot(), []
        for shape, dtype in layouts:
            tensors.append(self.memory.view(self.target, offset, shape, dtype))
            offset += aligned(tensors[-1].nbytes)
        return tensors

    def release(self, stream: torch.cuda.Stream) -> None:
        """Give the slot of the last received message back once all work given to `stream` so far is done."""
        write_value(stream, self.memory.address(self.source, self.taken), self.count)

    def _slot(self) -> int:
        return self.slots + (self.count - 1) % SLOTS * self.capacity


@dataclass(frozen=True)
class Region:
    """Channels whose slots lie at the same place of their targets' memory; a rank is the target of one of them at most.

    Attributes:
        capacity: bytes of a slot.
        pairs: source and target of each.
    """

    capacity: int
    pairs: tuple[tuple[int, int], ...]


class PeerChannels:
    """All channels of a group of ranks; every rank makes them together, and has those that start or end at it.

    Args:
        regions: of the channels, the same on every rank.
        rank: this one.
        size: ranks of the group.
        group: over gloo.
        device: of this rank.
    """

    def __init__(
        self, regions: Mapping[str, Region], rank: int, size: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.rank = rank
        # Made now: when it is needed, another thread waits for the GPU, and the driver may make no streams meanwhile.
        self._releasing = new_stream(device, priority=-1)
        self._context = current_context()
        counters = aligned(len(regions) * (1 + size) * COUNTER_BYTES)
        self.memory = PeerMemory(counters + SLOTS * sum(own.capacity for own in regions.values()), group, device)
        self._channels: dict[tuple[str, int, int], Channel] = {}
        slots, first = counters, 0
        for name, own in regions.items():
            for source, target in own.pairs:
                if rank in (source, target):
                    arrived, taken = first * COUNTER_BYTES, (first + 1 + target) * COUNTER_BYTES
                    self._channels[name, source, target] = Channel(
                        self.memory, source, target, slots, own.capacity, arrived, taken
                    )
            slots += SLOTS * own.capacity
            first += 1 + size

    def get(self, region: str, source: int, target: int) -> Channel:
        """A channel that starts or ends at this rank."""
        return self._channels[region, source, target]

    def release_waits(self) -> None:
        """Let every wait of this rank's streams end, after an error; the data they wait for never comes. Any thread may."""
        enter_context(self._context)
        for channel in self._channels.values():
            counter = channel.arrived if channel.target == self.rank else channel.taken
            write_value(self._releasing, self.memory.address(self.rank, counter), channel.count + RELEASED)
