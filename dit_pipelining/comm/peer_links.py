"""Links between ranks that have a GPU each on one host: the copy engines move the data, streams wait for counters.

[Note: peer copies]
A channel leads from one rank to another: two slots in the target's memory that the source copies into, a counter there of
what has arrived, and a counter at the source of what was taken out. The source's stream waits until a slot is free, copies,
and counts up; the target's stream waits for the count, uses the slot, and counts up at the source. No kernel spins
meanwhile, no host waits, and no host message is needed.

Why nothing can deadlock, whatever hardware queue a stream shares: every rank gives its GPU the work of call k = 0, 1, ... in
the order of the calls, which is the same on all ranks, and a wait of call k is for work of call k or earlier ones, which
was given to the other GPU before. So the smallest unfinished call can always go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dit_pipelining.comm.cuda_streams import current_context, enter_context, new_stream, wait_value, write_value
from dit_pipelining.comm.mesh import Mesh
from dit_pipelining.comm.peer_memory import PeerMemory

SLOTS = 2
"""Messages of a channel that may lie at the target: one in use, one arriving."""

ALIGNMENT = 256
"""Of tensors in a slot, in bytes: what kernels for aligned data ask for."""

COUNTER_BYTES = 64

RELEASED = 1 << 30
"""Added to a counter that nobody will count up any more, so that waits for it end."""


def slot_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a slot that holds tensors of these sizes in bytes."""
    return sum(_aligned(size) for size in sizes)


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
        self.count += 1
        if self.count > SLOTS:
            wait_value(stream, self.memory.address(self.source, self.taken), self.count - SLOTS)
        offset = self._slot()
        for tensor in tensors:
            self.memory.view(self.target, offset, tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
            offset += _aligned(tensor.nbytes)
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
            offset += _aligned(tensors[-1].nbytes)
        return tensors

    def release(self, stream: torch.cuda.Stream) -> None:
        """Give the slot of the last received message back once all work given to `stream` so far is done."""
        write_value(stream, self.memory.address(self.source, self.taken), self.count)

    def _slot(self) -> int:
        return self.slots + (self.count - 1) % SLOTS * self.capacity


class PeerLinks:
    """All channels that start or end at this rank.

    Attributes:
        incoming: from the stage before; None for the first one.
        outgoing: to the next stage; None for the last one.
        results_from: by replica, from its last stage; without the own one, if this rank is that stage.
        results_to: to every other rank, if this rank is its replica's last stage.
    """

    def __init__(self, mesh: Mesh, group: dist.ProcessGroup, device: torch.device) -> None:
        self.mesh = mesh
        self.group = group
        self.device = device
        self.hop_bytes = 0
        self.result_bytes = 0
        self.memory: PeerMemory | None = None
        # Made now: when it is needed, another thread waits for the GPU, and the driver may make no streams meanwhile.
        self._releasing = new_stream(device, priority=-1)
        self._context = current_context()
        self.incoming: Channel | None = None
        self.outgoing: Channel | None = None
        self.results_from: dict[int, Channel] = {}
        self.results_to: list[Channel] = []

    def reserve(self, hop_bytes: int, result_bytes: int) -> None:
        """Make slots of at least these sizes. All ranks ask for the same at the same call, and wait where they grow."""
        if self.memory is not None and hop_bytes <= self.hop_bytes and result_bytes <= self.result_bytes:
            return
        self.hop_bytes, self.result_bytes = max(hop_bytes, self.hop_bytes), max(result_bytes, self.result_bytes)
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group)  # nobody uses the old slots any more
        self._drop()
        mesh = self.mesh
        counters = _aligned((2 + mesh.replicas + mesh.size) * COUNTER_BYTES)
        self.memory = PeerMemory(
            counters + SLOTS * (self.hop_bytes + mesh.replicas * self.result_bytes), self.group, self.device
        )
        self._connect(self.memory, counters)

    def release_waits(self) -> None:
        """Let every wait of this rank's streams end, after an error; the data they wait for never comes. Any thread may."""
        if self.memory is None:
            return
        stream = self._releasing
        enter_context(self._context)
        arrivals = [channel for channel in (self.incoming, *self.results_from.values()) if channel]
        for channel in arrivals:
            write_value(stream, self.memory.address(self.mesh.rank, channel.arrived), channel.count + RELEASED)
        for channel in [channel for channel in (self.outgoing, *self.results_to) if channel]:
            write_value(stream, self.memory.address(self.mesh.rank, channel.taken), channel.count + RELEASED)

    def _connect(self, memory: PeerMemory, counters: int) -> None:
        mesh = self.mesh
        ranks = mesh.ranks_of(mesh.replica)

        def counter(number: int) -> int:
            return number * COUNTER_BYTES

        def hop(stage: int) -> Channel:
            return Channel(
                memory, ranks[stage], ranks[stage + 1], counters, self.hop_bytes, arrived=counter(0), taken=counter(1)
            )

        def results(replica: int, target: int) -> Channel:
            slots = counters + SLOTS * (self.hop_bytes + replica * self.result_bytes)
            taken = counter(2 + mesh.replicas + target)
            root = mesh.ranks_of(replica)[-1]
            return Channel(memory, root, target, slots, self.result_bytes, counter(2 + replica), taken)

        last = mesh.pipeline_size - 1
        self.incoming = hop(mesh.stage - 1) if mesh.stage else None
        self.outgoing = hop(mesh.stage) if mesh.stage < last else None
        roots = {replica: mesh.ranks_of(replica)[-1] for replica in range(mesh.replicas)}
        self.results_from = {replica: results(replica, mesh.rank) for replica, r in roots.items() if r != mesh.rank}
        targets = [rank for rank in range(mesh.size) if rank != mesh.rank]
        self.results_to = [results(mesh.replica, target) for target in targets] if mesh.stage == last else []

    def _drop(self) -> None:
        self.memory = self.incoming = self.outgoing = None
        self.results_from, self.results_to = {}, []


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
