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
    """All directions of one pipeline.

    Attributes:
        hops: from each stage to the next.
        back: from the last stage to the first: the latents of rows that go on to another level.
        fresh: from the first stage to the last: what sources give.
        control: a gloo group of all ranks.
    """

    hops: tuple[Direction, ...]
    back: Direction
    fresh: Direction
    control: dist.ProcessGroup


def make_stream_links(stages: Sequence[int], timeout: timedelta, backend: str, device: torch.device) -> StreamLinks:
    """Make all groups; every rank calls this.

    Args:
        stages: the rank of each stage, two or more.
        timeout: of every wait.
        backend: "gloo" or "nccl", for tensors; headers take gloo.
        device: of this rank.
    """

    def direction(source: int, target: int) -> Direction:
        headers = dist.new_group([source, target], timeout=timeout, backend="gloo")
        options = group_options(backend)
        data = dist.new_group([source, target], timeout=timeout, backend=backend, pg_options=options)
        return Direction(source, target, headers, data, backend)

    hops = tuple(direction(one, other) for one, other in pairwise(stages))
    back, fresh = direction(stages[-1], stages[0]), direction(stages[0], stages[-1])
    warm_up([*hops, back, fresh], device)
    return StreamLinks(hops, back, fresh, dist.new_group(list(stages), timeout=timeout, backend="gloo"))
