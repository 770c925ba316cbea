"""Streams of a Wan with random weights over the GPUs of one host, one stage on each; under torchrun."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from stream_gpu import (
    CONTEXT,
    LEVELS,
    OneGpu,
    Picture,
    Workload,
    filled,
    first_frame,
    measured,
    picture,
    prepared,
    seconds_of_vae,
)
from stream_stages import split_of, stages_of

from dit_pipelining.api import SplitModel, StreamSpec
from dit_pipelining.comm.cuda_streams import new_stream
from dit_pipelining.stream.attention import make_plain
from dit_pipelining.stream.batch_scheduler import StreamBatchScheduler
from dit_pipelining.stream.head import Source, StreamInput
from dit_pipelining.stream.layouts import Layouts
from dit_pipelining.stream.links import make_stream_links
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.rank import StreamRank
from dit_pipelining.stream.simulation import StageCost, fit_cost
from dit_pipelining.stream.stage import StreamStage
from dit_pipelining.stream.tail import FinishedChunk

TIMEOUT = timedelta(seconds=120)
PROBED = 12


class Ranks:
    """Plays streams through the stages of all ranks, by a transport."""

    def __init__(self, split: SplitModel, own: Picture, transport: str) -> None:
        self.split = split
        self.own = own
        self.transport = transport
        self.device = own.frames.device
        self.stages: list[StreamStage] = []

    def __call__(self, spec: StreamSpec, source: Source) -> Iterator[FinishedChunk]:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.stages = []  # its keys and values make room
        self.stages = stages_of(self.split, spec, self.own.shape, self.own.text, [rank], StreamStage)
        noise = NoiseSource(0, self.own.shape, torch.float32, self.device)
        sizes = Layouts(self.stages[0], noise).sizes()
        links = make_stream_links([range(world)], TIMEOUT, self.transport, self.device, sizes)
        return StreamRank(self.stages[0], rank, world, links, noise, TIMEOUT.total_seconds()).run([source])


@torch.no_grad()
def on_several_gpus(workload: Workload, transport: str) -> Iterator[dict[str, Any]]:
    """A row for each size and number of levels; on the last rank, the others give nothing."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    model, vae = prepared(workload, device)
    with torch.cuda.stream(new_stream(device)):
        for size in workload.sizes:
            own = picture(size, device, model.dtype)
            yield from _sizes(model, vae, size, own, workload, transport)
    dist.barrier()


def _sizes(
    model: Any, vae: Any, size: str, own: Picture, workload: Workload, transport: str
) -> Iterator[dict[str, Any]]:
    world = dist.get_world_size()
    vae_seconds = seconds_of_vae(vae, own)
    tick = _tick_seconds(model, own, workload)
    for count in workload.levels:
        spec = StreamSpec(levels=LEVELS[:count], **CONTEXT)
        cost = tick.fixed + tick.per_row * count
        counts = _agreed(blocks_of(cost, vae_seconds, len(model.blocks), world))
        split = split_of(model, own.shape, own.text, counts)
        if workload.mode != "none":
            split.compile(workload.mode, [dist.get_rank()])
        line = Ranks(split, own, transport)
        began = time.perf_counter()
        row = measured(line, spec, world, vae, own, workload.chunks)
        mine = fit_cost(line.stages[0].seconds())
        costs = [mine] * world
        dist.all_gather_object(costs, mine)
        first = first_frame(line, spec, world, vae, own)
        costs[0] = replace(costs[0], per_start=vae_seconds["encode"])
        costs[-1] = replace(costs[-1], per_finish=vae_seconds["decode"])
        if row:
            facts = {"model": workload.model, "size": size, "compile": workload.mode, "gpus": world}
            yield {
                **facts,
                "transport": transport,
                "levels": count,
                "blocks": counts,
                **row,
                "first_frame": first,
                "stages": [vars(cost) for cost in costs],
                "predicted_fps": StreamBatchScheduler(costs, spec).forecast(spec).fps,
                "took": time.perf_counter() - began,
            }
    make_plain(model.blocks)


def _tick_seconds(model: Any, own: Picture, workload: Workload) -> StageCost:
    """What a tick of the whole transformer takes on this GPU, by rows."""
    split = split_of(model, own.shape, own.text, [len(model.blocks)])
    if workload.mode != "none":
        split.compile(workload.mode)
    line = OneGpu(split, own)
    samples = []
    for count in sorted({workload.levels[0], workload.levels[-1]}):
        for _ in line(StreamSpec(levels=LEVELS[:count], **CONTEXT), iter([StreamInput()] * (PROBED + count))):
            pass
        samples.append((count, line.seconds_per_tick(count)))
    make_plain(model.blocks)
    return fit_cost(samples)


def blocks_of(cost: float, vae: dict[str, float], blocks: int, ranks: int) -> list[int]:
    """Blocks per rank, so that the busiest is least busy: the first encodes, the last decodes, each has one at least."""
    shares = filled(cost, _extra(vae, ranks))
    counts = [max(1, round(blocks * share / cost)) for share in shares]
    while sum(counts) != blocks:
        step = 1 if sum(counts) < blocks else -1
        busy = [own * cost / blocks + extra for own, extra in zip(counts, _extra(vae, ranks), strict=True)]
        chosen = min(range(ranks), key=lambda rank: busy[rank]) if step == 1 else _busiest(counts, busy)
        counts[chosen] += step
    return counts


def _busiest(counts: Sequence[int], busy: Sequence[float]) -> int:
    return max((rank for rank, own in enumerate(counts) if own > 1), key=lambda rank: busy[rank])


def _extra(vae: dict[str, float], ranks: int) -> list[float]:
    return [vae["encode"], *[0.0] * (ranks - 2), vae["decode"]]


def _agreed(counts: list[int]) -> list[int]:
    """Those of the first rank."""
    shared = [counts]
    dist.broadcast_object_list(shared, 0)
    return shared[0]
