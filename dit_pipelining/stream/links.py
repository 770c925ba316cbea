"""The directions that messages of a stream take between the ranks of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from dit_pipelining.comm.links import Link, Wire, group_options
from dit_pipelining.comm.messages import Direction
from dit_pipelining.comm.peer_channels import PeerChannels, Region


@dataclass(frozen=True)
class StreamLinks:
    """All directions that the ranks of one pipeline use.

    With two pipelines the second one, the twin, runs the rows without the prompt (guidance).

    Attributes:
        hops: from each stage to the next.
        back: from the last stage to the first: the latents of rows that go on to another level. None with one stage.
        fresh: from the first stage to the last: what sources give. None with one stage.
        control: a gloo group of all ranks, of both pipelines.
        twin: from the first stage of the first pipeline to that of the twin: the latents of the rows.
        flow: from the last stage of the twin to that of the first pipeline: what it predicts.
        channels: of peer copies, where tensors take those.
    """

    hops: tuple[Direction, ...]
    back: Direction | None
    fresh: Direction | None
    control: dist.ProcessGroup
    twin: Direction | None = None
    flow: Direction | None = None
    channels: PeerChannels | None = None

    def release_waits(self, error: BaseException) -> None:
        """Let every wait of this rank's GPU end, after an error."""
        if self.channels is not None:
            self.channels.release_waits()


def make_stream_links(
    pipelines: Sequence[Sequence[int]],
    timeout: timedelta,
    transport: str,
    device: torch.device,
    sizes: Mapping[str, int] | None = None,
) -> StreamLinks:
    """Make all groups; every rank calls this, and gets the links of its own pipeline.

    Args:
        pipelines: the rank of each stage, of one pipeline or of two.
        timeout: of every wait.
        transport: as `choose_transport` gives it, for tensors; headers take gloo.
        device: of this rank.
        sizes: with transport `"peer"` the bytes of the largest message of each kind of direction.
    """
    pairs = directions(pipelines)
    control = dist.new_group([rank for ranks in pipelines for rank in ranks], timeout=timeout, backend="gloo")
    channels = None
    if transport == "peer":
        assert sizes is not None
        regions = {name: Region(sizes[name], own) for name, own in pairs.items()}
        channels = PeerChannels(regions, dist.get_rank(), control.size(), control, device)
    backend = "nccl" if transport == "nccl" else "gloo"

    def direction(name: str, source: int, target: int) -> Direction:
        headers = dist.new_group([source, target], timeout=timeout, backend="gloo")
        mine = dist.get_rank() in (source, target)
        if channels is not None:
            return Direction(source, target, headers, channels.get(name, source, target) if mine else None)
        group = dist.new_group([source, target], timeout=timeout, backend=backend, pg_options=group_options(backend))
        link = Link(source, target, Wire(group, backend))
        link.warm_up(device)
        return Direction(source, target, headers, link)

    made = {name: [direction(name, *pair) for pair in own] for name, own in pairs.items()}
    own_ranks = next(ranks for ranks in pipelines if dist.get_rank() in ranks)
    hops = tuple(hop for hop in made["hop"] if hop.source in own_ranks)
    back, fresh, twin, flow = (next(iter(made[name]), None) for name in ("back", "fresh", "twin", "flow"))
    return StreamLinks(hops, back, fresh, control, twin, flow, channels)


def directions(pipelines: Sequence[Sequence[int]]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Source and target of each direction, by what it is for."""
    first, last = pipelines[0][0], pipelines[0][-1]
    found: dict[str, tuple[tuple[int, int], ...]] = {
        "hop": tuple(pair for ranks in pipelines for pair in pairwise(ranks)),
        "back": ((last, first),) if first != last else (),
        "fresh": ((first, last),) if first != last else (),
        "twin": (),
        "flow": (),
    }
    if len(pipelines) == 2:
        found |= {"twin": ((first, pipelines[1][0]),), "flow": ((pipelines[1][-1], last),)}
    return found
