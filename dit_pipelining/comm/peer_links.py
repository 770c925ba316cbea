"""Links between the stages of a line of ranks that have a GPU each on one host: channels of peer copies."""

from itertools import pairwise

import torch
import torch.distributed as dist

from dit_pipelining.comm.mesh import Mesh
from dit_pipelining.comm.peer_channels import Channel, PeerChannels, Region


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
        self.channels: PeerChannels | None = None
        self.incoming: Channel | None = None
        self.outgoing: Channel | None = None
        self.results_from: dict[int, Channel] = {}
        self.results_to: list[Channel] = []

    def reserve(self, hop_bytes: int, result_bytes: int) -> None:
        """Make slots of at least these sizes. All ranks ask for the same at the same call, and wait where they grow."""
        if self.channels is not None and hop_bytes <= self.hop_bytes and result_bytes <= self.result_bytes:
            return
        self.hop_bytes, self.result_bytes = max(hop_bytes, self.hop_bytes), max(result_bytes, self.result_bytes)
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group)  # nobody uses the old slots any more
        self._drop()
        self._connect()

    def release_waits(self) -> None:
        """Let every wait of this rank's streams end, after an error."""
        if self.channels is not None:
            self.channels.release_waits()

    def _connect(self) -> None:
        mesh = self.mesh
        lines = [mesh.ranks_of(replica) for replica in range(mesh.replicas)]
        hops = tuple(pair for ranks in lines for pair in pairwise(ranks))
        regions = {"hop": Region(self.hop_bytes, hops)}
        for replica, ranks in enumerate(lines):
            pairs = tuple((ranks[-1], rank) for rank in range(mesh.size) if rank != ranks[-1])
            regions[f"results {replica}"] = Region(self.result_bytes, pairs)
        self.channels = channels = PeerChannels(regions, mesh.rank, mesh.size, self.group, self.device)
        own, last = mesh.rank, mesh.pipeline_size - 1
        self.incoming = channels.get("hop", own - 1, own) if mesh.stage else None
        self.outgoing = channels.get("hop", own, own + 1) if mesh.stage < last else None
        roots = {replica: ranks[-1] for replica, ranks in enumerate(lines)}
        self.results_from = {
            replica: channels.get(f"results {replica}", root, own) for replica, root in roots.items() if root != own
        }
        targets = [rank for rank in range(mesh.size) if rank != own]
        name = f"results {mesh.replica}"
        self.results_to = [channels.get(name, own, target) for target in targets] if mesh.stage == last else []

    def _drop(self) -> None:
        self.channels = self.incoming = self.outgoing = None
        self.results_from, self.results_to = {}, []
