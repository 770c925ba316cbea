"""The directions that messages of a stream take between the ranks of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from dit_pipelining.comm.links import group_options
from dit_pipelining.comm.message_link import Direction, warm_up


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
    """

    hops: tuple[Direction, ...]
    back: Direction | None
    fresh: Direction | None
    control: dist.ProcessGroup
    twin: Direction | None = None
    flow: Direction | None = None


def make_stream_links(
    pipelines: Sequence[Sequence[int]], timeout: timedelta, backend: str, device: torch.device
) -> StreamLinks:
    """Make all groups; every rank calls this, and gets the links of its own pipeline.

    Args:
        pipelines: the rank of each stage, of one pipeline or of two.
        timeout: of every wait.
        backend: "gloo" or "nccl", for tensors; headers take gloo.
        device: of this rank.
    """

    def direction(source: int, target: int) -> Direction:
        headers = dist.new_group([source, target], timeout=timeout, backend="gloo")
        options = group_options(backend)
        data = dist.new_group([source, target], timeout=timeout, backend=backend, pg_options=options)
        return Direction(source, target, headers, data, backend)

    hops = [tuple(direction(one, other) for one, other in pairwise(ranks)) for ranks in pipelines]
    first, last = pipelines[0][0], pipelines[0][-1]
    back, fresh = (direction(last, first), direction(first, last)) if first != last else (None, None)
    twin = flow = None
    if len(pipelines) == 2:
        twin, flow = direction(first, pipelines[1][0]), direction(pipelines[1][-1], last)
    every = [own for own in (*(hop for own in hops for hop in own), back, fresh, twin, flow) if own is not None]
    warm_up(every, device)
    control = dist.new_group([rank for ranks in pipelines for rank in ranks], timeout=timeout, backend="gloo")
    number = next(number for number, ranks in enumerate(pipelines) if dist.get_rank() in ranks)
    return StreamLinks(hops[number], back, fresh, control, twin, flow)
