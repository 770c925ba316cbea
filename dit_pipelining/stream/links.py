"""The directions that messages of a stream take between the ranks of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch.distributed as dist

from dit_pipelining.comm.message_link import Direction


@dataclass(frozen=True)
class StreamLinks:
    """All directions of one pipeline.

    Attributes:
        hops: from each stage to the next.
        back: from the last stage to the first: the latents of rows that go on to another level.
        fresh: from the first stage to the last: what sources give. None where they give nothing.
        frames: from the last stage to the rank that decodes, if that is one of its own.
        control: a gloo group of all ranks.
    """

    hops: tuple[Direction, ...]
    back: Direction
    fresh: Direction
    frames: Direction | None
    control: dist.ProcessGroup


def make_stream_links(
    stages: Sequence[int], decoder: int | None, timeout: timedelta, backend: str
) -> StreamLinks:
    """Make all groups; every rank calls this.

    Args:
        stages: the rank of each stage, two or more.
        decoder: the rank that decodes, if it runs no stage.
        timeout: of every wait.
        backend: "gloo" or "nccl", for tensors; headers take gloo.
    """

    def direction(source: int, target: int) -> Direction:
        headers = dist.new_group([source, target], timeout=timeout, backend="gloo")
        data = dist.new_group([source, target], timeout=timeout, backend=backend)
        return Direction(source, target, headers, data, backend)

    hops = tuple(direction(one, other) for one, other in pairwise(stages))
    back, fresh = direction(stages[-1], stages[0]), direction(stages[0], stages[-1])
    frames = direction(stages[-1], decoder) if decoder is not None else None
    every = [*stages, *([] if decoder is None else [decoder])]
    return StreamLinks(hops, back, fresh, frames, dist.new_group(every, timeout=timeout, backend="gloo"))
