"""Cut a captured model for a machine: costs, ranks, partition, and the ranks of the components beside it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.comm.layout import ONE_RANK, Layout
from dit_pipelining.comm.peer_channels import SLOTS
from dit_pipelining.costs.devices import DeviceProfile, find_device
from dit_pipelining.costs.inside import rank_costs
from dit_pipelining.costs.machine import Machine, Rank
from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.costs.model_costs import model_costs
from dit_pipelining.costs.roofline import Roofline
from dit_pipelining.costs.together import NO_OTHERS, Others, with_others
from partitioners import (
    Component,
    ModelCosts,
    Partition,
    Partitioner,
    RankSpec,
    counts_from_environment,
    default_owners,
    place,
    resolve_partition,
    with_components,
)


@dataclass(frozen=True)
class CutPlan:
    """How a model is cut, and for what.

    Attributes:
        partition: blocks per stage.
        costs: of the model on each rank, with the weights of transformers beside it.
        ranks: one per stage, with what the components take of them.
        owners: stage whose rank holds each component, by name.
    """

    partition: Partition
    costs: ModelCosts
    ranks: tuple[RankSpec, ...]
    owners: Mapping[str, int]


def plan_cut(
    graph: BlockGraph,
    model: nn.Module,
    machine: Machine,
    partitioner: str | Partitioner,
    counts: Sequence[int] | str | None = None,
    components: Sequence[Component] = (),
    environment: Mapping[str, str] = os.environ,
    *,
    layout: Layout = ONE_RANK,
    shards: int = 1,
    others: Others = NO_OTHERS,
    blocks: Sequence[str] | None = None,
) -> CutPlan:
    """Choose where to cut: the same for a run and for what is shown of one.

    Only `vae-aware` chooses the components' ranks and counts their seconds; the others find them on the ranks that they are
    bound to or prefer, and count their bytes.

    Args:
        graph: of the whole call, captured with `count_work` on a model of which nothing is cut.
        model: that model, with weights or without.
        machine: its ranks.
        partitioner: see `resolve_partition`.
        counts: blocks per stage, where they were given.
        components: text encoders and VAE.
        environment: where to look for VLLM_PP_LAYER_PARTITION.
        layout: how many ranks share what of a stage.
        shards: ranks over which HSDP keeps the weights of each block.
        others: transformers on the same ranks.
        blocks: names of the model's blocks, see `find_blocks`.

    Raises:
        PartitionError: the model cannot be cut like this, or does not fit.
        ConfigError: the machine's profile is of another model.
    """
    costs = with_others(rank_costs(graph, model, machine, layout, shards, blocks), others)
    costs = replace(costs, components=tuple(components))
    ranks = with_buffers(costs, [_rank_spec(rank, machine, graph, model) for rank in machine.ranks])
    if partitioner == "vae-aware" and counts is None and counts_from_environment(environment) is None:
        placement = place(costs, ranks)
        return CutPlan(placement.partition, costs, placement.ranks, placement.owners)
    owners = default_owners(components, len(ranks))
    held = with_components(ranks, [replace(component, seconds=0.0) for component in components], owners)
    partition = resolve_partition(partitioner, costs, held, counts=counts, environment=environment)
    return CutPlan(partition, costs, tuple(with_components(ranks, components, owners)), owners)


def with_buffers(costs: ModelCosts, ranks: Sequence[RankSpec]) -> list[RankSpec]:
    """The ranks with what they have for transfers beside their activations, at the widest boundary.

    That is slots for what is received, on every rank; copies of what waits to be sent; and the stage's own copy of what
    arrived.
    """
    widest, last = max(cost.boundary_bytes for cost in costs.blocks), len(ranks) - 1
    if last == 0:
        return list(ranks)
    copies = [SLOTS + (SLOTS if stage < last else 0) + (1 if stage else 0) for stage in range(len(ranks))]
    return [
        replace(rank, fixed_bytes=rank.fixed_bytes + number * widest)
        for rank, number in zip(ranks, copies, strict=True)
    ]


def _rank_spec(rank: Rank, machine: Machine, graph: BlockGraph, model: nn.Module) -> RankSpec:
    if rank.spec is not None:
        return rank.spec
    if rank.device is None:
        return RankSpec(rank.speed, rank.memory_bytes)
    link = rank.device.link(machine.topology)
    return RankSpec(
        speed=rank.speed * _relative_speed(rank.device, machine, graph, model),
        memory_bytes=rank.memory_bytes,
        link_bytes_per_second=link.usable_bytes_per_second,
        link_latency_seconds=link.latency_seconds,
    )


def _relative_speed(device: DeviceProfile, machine: Machine, graph: BlockGraph, model: nn.Module) -> float:
    """How many times faster a device runs the model than the one that seconds are given for, by their data sheets."""
    timing = machine.timing
    if isinstance(timing, MeasuredProfile):
        reference = find_device(timing.device)
    elif isinstance(timing, Roofline):
        reference = timing.device
    else:
        return 1.0
    if reference == device:
        return 1.0
    return _seconds(reference, graph, model) / _seconds(device, graph, model)


def _seconds(device: DeviceProfile, graph: BlockGraph, model: nn.Module) -> float:
    costs = model_costs(graph, model, Roofline(device))
    return sum(part.seconds for part in (costs.prologue, *costs.blocks, costs.epilogue))
