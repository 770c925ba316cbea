"""Bytes that each rank needs, by what they are for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from dit_pipelining.capture.nodes import value_bytes
from dit_pipelining.comm.peer_channels import SLOTS
from dit_pipelining.costs.inside import held_bytes
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.lowering.stage import StageModule
from dit_pipelining.planning.components import NOTHING, HeldBeside, Placed
from dit_pipelining.planning.degrees import ALONE, Degrees
from dit_pipelining.planning.timeline import Workload


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank needs.

    Attributes:
        weights: of its stages, without copies.
        replicated: weights that a stage before it holds too.
        activations: of the fullest moment of its stages, or of decoding where that is fuller.
        buffers: slots for what is received, which peer copies have on every rank, the stage's own copy of it, and copies of
            what waits to be sent.
        requests: what requests in flight hold: the inputs and results of their calls, and what the stage computes of those
            inputs once (see `KeptFunction`).
        encoders: weights of text and image encoders.
        vae: weights of the VAE.
    """

    weights: int = 0
    replicated: int = 0
    activations: int = 0
    buffers: int = 0
    requests: int = 0
    encoders: int = 0
    vae: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in MEMORY_KINDS)


MEMORY_KINDS = tuple(field.name for field in fields(RankMemory))


def rank_memory(
    splits: Sequence[tuple[SplitModel, int]],
    workload: Workload,
    beside: Placed = NOTHING,
    degrees: Degrees = ALONE,
) -> tuple[RankMemory, ...]:
    """Memory of each rank of a line; of the ranks that share its stage, where they differ, the fullest.

    Args:
        splits: the transformers that differ, each with the number of those that are like it. They run one after the other,
            so that they share activations and buffers. Their cuts are planned for what a rank computes and holds.
        workload: the schedule.
        beside: the components, on the ranks of a line.
        degrees: how ranks share the stages.
    """
    held = [_weights(split, degrees) for split, _ in splits]
    ranks = range(workload.num_ranks)
    return tuple(_rank(rank, splits, held, workload, beside.held_by(rank), degrees) for rank in ranks)


def _rank(
    rank: int,
    splits: Sequence[tuple[SplitModel, int]],
    weights: Sequence[Sequence[tuple[int, int]]],
    workload: Workload,
    beside: HeldBeside,
    degrees: Degrees,
) -> RankMemory:
    stage = rank % workload.num_stages
    held, copied, activations, buffers, kept = 0, 0, beside.decode, 0, 0
    for (split, number), stages in zip(splits, weights, strict=True):
        own, copies = stages[stage]
        held += own * number
        copied += copies * number
        activations = max(activations, _activations(split, stage))
        buffers = max(buffers, _buffers(split, stage, workload, degrees.sequence))
        kept += _kept(split, stage, workload) * number
    requests = kept + max(_given(split, workload) for split, _ in splits)
    return RankMemory(held, copied, activations, buffers, requests, beside.encoders, beside.vae)


def _weights(split: SplitModel, degrees: Degrees) -> list[tuple[int, int]]:
    """Bytes of parameters and buffers of each stage: of those that no stage before it holds, and of the others."""
    sizes = held_bytes(split.model, degrees, degrees.shards)
    before: set[int] = set()
    found = []
    for stage in split.stages:
        tensors = _tensors(stage)
        own = sum(sizes[name] for key, name in tensors.items() if key not in before)
        found.append((math.ceil(own), math.ceil(sum(sizes[name] for name in tensors.values()) - own)))
        before |= tensors.keys()
    return found


def _tensors(stage: StageModule) -> dict[int, str]:
    """Names of a stage's parameters and buffers; one of several names of a tensor that has more."""
    return {id(tensor): name for name, tensor in (*stage.named_parameters(), *stage.named_buffers())}


def _activations(split: SplitModel, stage: int) -> int:
    assert split.cut is not None
    work = split.partition.stage_work(split.cut.costs)[stage]
    return max((cost.activation_bytes for cost in work), default=0)


def _buffers(split: SplitModel, stage: int, workload: Workload, parts: int) -> int:
    """Of a rank that has one of so many parts of what crosses between stages."""
    crossing = [math.ceil(sum(value.bytes for value in values) / parts) for values in split.boundaries]
    received = crossing[stage - 1] if stage else 0
    results = sum(value_bytes(node) for node in split.graph.output_nodes)
    is_last = stage == split.num_stages - 1
    if workload.schedule == "gpipe":  # torch's PipelineStage has buffers for every microbatch
        return workload.requests * (received + (results if is_last else crossing[stage]))
    if workload.num_ranks == 1:
        return 0
    return SLOTS * (max(crossing, default=0) + results + (0 if is_last else crossing[stage])) + received


def _calls(workload: Workload) -> int:
    """Of a step of all requests in flight. One process runs one request after the other."""
    return (1 if workload.num_ranks == 1 else workload.at_a_time) * workload.calls_per_step


def _given(split: SplitModel, workload: Workload) -> int:
    """Inputs of the calls, what comes of them, and what the pipeline makes of that (its next latents)."""
    nodes = split.graph.graph.nodes
    inputs = sum(value_bytes(node) for node in nodes if node.op == "placeholder")
    results = sum(value_bytes(node) for node in split.graph.output_nodes)
    return _calls(workload) * (inputs + 2 * results)


def _kept(split: SplitModel, stage: int, workload: Workload) -> int:
    """Of one transformer; of values made of no input there is one for all calls."""
    for_each, for_all = split.stages[stage].kept_bytes(split.graph)
    return math.ceil(_calls(workload) / workload.replicas) * for_each + for_all
