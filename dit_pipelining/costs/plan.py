"""Cut a captured model for a machine: costs, ranks, partition, and the ranks of the components beside it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.costs.devices import DeviceProfile, find_device
from dit_pipelining.costs.machine import Machine, Rank
from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.costs.model_costs import model_costs
from dit_pipelining.costs.roofline import Roofline
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
        costs: of the model.
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
    costs: ModelCosts | None = None,
) -> CutPlan:
    """Choose where to cut.

    Only `vae-aware` chooses the components' ranks and counts their seconds; the others find them on the ranks that they are
    bound to or prefer, and count their bytes.

    Args:
        graph: of the model's forward, captured with `count_work`.
        model: with weights or without.
        machine: its ranks.
        partitioner: see `resolve_partition`.
        counts: blocks per stage, where they were given.
        components: text encoders and VAE.
        environment: where to look for VLLM_PP_LAYER_PARTITION.
        costs: of the model on each rank, where several share a stage. Default: of the whole model, by the machine's timing.

    Raises:
        PartitionError: the model cannot be cut like this, or does not fit.
        ConfigError: the machine's profile is of another model.
    """
    costs = replace(costs or model_costs(graph, model, machine.timing), components=tuple(components))
    ranks = [_rank_spec(rank, machine, graph, model) for rank in machine.ranks]
    if partitioner == "vae-aware" and counts is None and counts_from_environment(environment) is None:
        placement = place(costs, ranks)
        return CutPlan(placement.partition, costs, placement.ranks, placement.owners)
    owners = default_owners(components, len(ranks))
    held = with_components(ranks, [replace(component, seconds=0.0) for component in components], owners)
    partition = resolve_partition(partitioner, costs, held, counts=counts, environment=environment)
    return CutPlan(partition, costs, tuple(with_components(ranks, components, owners)), owners)


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
