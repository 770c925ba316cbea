"""Search for the best way to spread a model over a number of equal GPUs.

What ranks share inside a stage is told in [Note: what a way costs] of `costs/inside.py`. The pipeline is cut by `balanced` for
these costs, and a run is simulated as `show` simulates it. Text encoders stay whole. Tiles of the VAE go to ranks as at a run,
and take the share of the seconds of a decode without tiles that their latents have; tiles overlap, so two ranks need not be
faster than one without tiles. Components lie where a run puts them; the VAE on every rank that computes tiles of it, whose
activations are then those of the largest tile.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dit_pipelining.costs.devices import DeviceProfile, Link
from dit_pipelining.costs.inside import BlockWork, shared_inside
from dit_pipelining.costs.plan import with_buffers
from dit_pipelining.costs.together import Others, with_others
from dit_pipelining.planning.degrees import Degrees, every_way, problem_of
from dit_pipelining.planning.forecast import result_seconds, transfer_seconds
from dit_pipelining.planning.simulation import simulate
from dit_pipelining.planning.timeline import Workload
from dit_pipelining.planning.work import ModelWork
from partitioners import BlockCost, DoesNotFitError, ModelCosts, RankSpec, balanced


@dataclass(frozen=True)
class Way:
    """One way to spread the model, and what it gives.

    Attributes:
        degrees: of each dimension.
        counts: blocks of each stage.
        latency: seconds of one request.
        requests_per_hour: of all GPUs together, with enough requests to fill the stages.
        memory_bytes: of the fullest rank.
        step_seconds: of one denoising step of one request.
        computing: share of a rank's time in a request in which it computes, on average.
        sending: seconds of a step in which a rank waits for others inside its blocks, by dimension.
    """

    degrees: Degrees
    counts: tuple[int, ...]
    latency: float
    requests_per_hour: float
    memory_bytes: int
    step_seconds: float
    computing: float
    sending: dict[str, float]


@dataclass(frozen=True)
class Refused:
    """A way that cannot be: why, and the bytes that a rank lacks, where it is memory."""

    degrees: Degrees
    reason: str
    lacks_bytes: int = 0


@dataclass(frozen=True)
class Search:
    """All ways, the best for the goal first, and those that cannot be."""

    goal: str
    gpus: int
    ways: tuple[Way, ...]
    refused: tuple[Refused, ...]


def search(work: ModelWork, gpus: int, device: DeviceProfile, topology: str = "auto", goal: str = "latency") -> Search:
    """Find the best degrees.

    Args:
        work: the model, from `model_work`.
        gpus: how many.
        device: each of them.
        topology: of the links between them.
        goal: of `GOALS`: the seconds of one request, requests per hour, or bytes of the fullest rank. Of ways that are
            equally good, those without HSDP go first.
    """
    link = device.link(topology)
    ways: list[Way] = []
    refused: list[Refused] = []
    for degrees in every_way(gpus):
        problem = problem_of(degrees, divides=work.divides, blocks=len(work.blocks), calls=work.calls * work.batch)
        if problem:
            refused.append(Refused(degrees, problem))
            continue
        fitting, lacking = [], []
        for choice in _tile_choices(work, degrees):
            try:
                fitting.append(_way(work, choice, device, link))
            except DoesNotFitError as error:
                lacking.append(max(error.shortfalls))
        if fitting:
            ways.append(min(fitting, key=ORDERS[goal]))
        else:
            refused.append(Refused(degrees, "the model does not fit into memory", min(lacking)))
    return Search(goal, gpus, tuple(sorted(ways, key=ORDERS[goal])), tuple(refused))


ORDERS: dict[str, Callable[[Way], tuple[float, ...]]] = {
    "latency": lambda way: (way.latency, way.degrees.shards, way.memory_bytes),
    "throughput": lambda way: (-way.requests_per_hour, way.degrees.shards, way.latency),
    "memory": lambda way: (way.memory_bytes, way.latency),
}
"""What is smaller for the better of two ways, by goal."""


def sharded_costs(work: ModelWork, degrees: Degrees, link: Link) -> ModelCosts:
    """Costs of a call on the ranks of one line."""
    scale = _samples(work, degrees) / work.batch
    works = [_scaled_work(block, scale) for block in work.blocks]
    whole = ModelCosts(
        tuple(BlockCost(0.0, activation_bytes=own.activations, boundary_bytes=own.hidden) for own in works),
        prologue=_scaled(work.prologue, scale),
        epilogue=_scaled(work.epilogue, scale),
    )
    return with_others(shared_inside(whole, works, degrees, degrees.shards, link), Others(alike=work.copies - 1))


def _way(work: ModelWork, degrees: Degrees, device: DeviceProfile, link: Link) -> Way:
    costs = sharded_costs(work, degrees, link)
    config, stages = degrees.config(), degrees.pipeline
    beside = work.beside.placed(config)
    ranks = [
        RankSpec(
            memory_bytes=device.usable_bytes,
            fixed_bytes=own.bytes,
            link_bytes_per_second=link.usable_bytes_per_second,
            link_latency_seconds=link.latency_seconds,
        )
        for own in beside.for_partitioner(config, work.steps * work.calls)
    ]
    ranks = with_buffers(costs, ranks)
    partition = balanced(costs, ranks)
    line = stages * degrees.cfg
    samples = _samples(work, degrees)
    load = Workload(
        stage_seconds=tuple(partition.compute_seconds(costs, ranks)),
        transfer_seconds=tuple(transfer_seconds(link, [costs.boundary_bytes(end)]) for _, end in partition.ranges[:-1]),
        result_seconds=result_seconds(link, [work.result_bytes * samples / work.batch], line),
        steps=work.steps,
        calls_per_step=work.calls * work.batch // samples,
        replicas=degrees.cfg,
        encodes=beside.encodes,
        decodes=beside.decodes,
    )
    alone = simulate(load)
    filled = simulate(replace(load, requests=2 * line))
    computing, sending = _sums(work, degrees, link)
    return Way(
        degrees=degrees,
        counts=tuple(partition.counts),
        latency=alone.makespan,
        requests_per_hour=3600 * degrees.data * 2 * line / filled.makespan,
        memory_bytes=max(partition.stage_bytes(costs, ranks)),
        step_seconds=alone.step_seconds,
        computing=(1 - alone.bubble) * computing / (computing + math.fsum(sending.values())),
        sending={name: value * load.calls_per_step for name, value in sending.items() if value},
    )


def _tile_choices(work: ModelWork, degrees: Degrees) -> list[Degrees]:
    """The VAE on one rank, and its tiles on as many as are done first."""
    degrees = replace(degrees, uneven=bool(work.divides.tokens and work.divides.tokens % degrees.sequence))
    ranks = range(1, degrees.size // degrees.data + 1)
    best = min(ranks, key=lambda number: work.beside.decode(number)[0])
    return [degrees] if best == 1 else [degrees, replace(degrees, tiles=best)]


def _sums(work: ModelWork, degrees: Degrees, link: Link) -> tuple[float, dict[str, float]]:
    """What all of a call computes, and what it waits for, by dimension."""
    scale = _samples(work, degrees) / work.batch
    total: dict[str, float] = {}
    computing = scale * (work.prologue.seconds + work.epilogue.seconds)
    for block in work.blocks:
        compute, sending = _scaled_work(block, scale).seconds(degrees, link)
        computing += compute
        gather = block.gather_seconds(degrees, degrees.shards, link)
        sending["hsdp"] = max(gather - compute - sum(sending.values()), 0.0)
        for name, value in sending.items():
            total[name] = total.get(name, 0.0) + value
    return computing, total


def _samples(work: ModelWork, degrees: Degrees) -> int:
    """Samples in each call: replicas share a batch as far as it divides."""
    return work.batch // math.gcd(work.batch, degrees.cfg)


def _scaled_work(block: BlockWork, scale: float) -> BlockWork:
    if scale == 1:
        return block
    return replace(
        block,
        matrix_seconds=block.matrix_seconds * scale,
        other_seconds=block.other_seconds * scale,
        activations=math.ceil(block.activations * scale),
        hidden=math.ceil(block.hidden * scale),
    )


def _scaled(glue: BlockCost, scale: float) -> BlockCost:
    return BlockCost(
        seconds=glue.seconds * scale,
        parameter_bytes=glue.parameter_bytes,
        activation_bytes=math.ceil(glue.activation_bytes * scale),
        boundary_bytes=math.ceil(glue.boundary_bytes * scale),
    )
