"""Bytes that each rank needs, by what they are for."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from dit_pipelining.capture.nodes import value_bytes
from dit_pipelining.comm.peer_channels import SLOTS
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.planning.components import Components
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
        encoders: weights of text and image encoders.
        vae: weights of the VAE.
    """

    weights: int = 0
    replicated: int = 0
    activations: int = 0
    buffers: int = 0
    encoders: int = 0
    vae: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in MEMORY_KINDS)


MEMORY_KINDS = tuple(field.name for field in fields(RankMemory))


def rank_memory(
    splits: Sequence[tuple[SplitModel, int]], workload: Workload, beside: Components
) -> tuple[RankMemory, ...]:
    """Memory of each rank of a replica.

    Args:
        splits: the transformers that differ, each with the number of those that are like it. They run one after the other,
            so that they share activations and buffers.
        workload: the schedule, and who encodes and decodes.
        beside: the components, on the ranks that the first cut gives them.
    """
    return tuple(_rank(rank, splits, workload, beside) for rank in range(workload.num_stages))


def _rank(rank: int, splits: Sequence[tuple[SplitModel, int]], workload: Workload, beside: Components) -> RankMemory:
    decodes = workload.decode_rank is None or rank == workload.decode_rank % workload.num_ranks
    held, copied, activations, buffers = 0, 0, beside.decode_bytes if decodes else 0, 0
    for split, number in splits:
        own, copies = _weights(split, rank)
        held += own * number
        copied += copies * number
        activations = max(activations, _activations(split, rank))
        buffers = max(buffers, _buffers(split, rank, workload))
    encoders = (
        beside.encoder_bytes
        if workload.encode_rank is None
        else beside.encoder_bytes_at((rank - workload.encode_rank) % workload.num_ranks)
    )
    return RankMemory(held, copied, activations, buffers, encoders, beside.vae_bytes if decodes else 0)


def _weights(split: SplitModel, rank: int) -> tuple[int, int]:
    """Bytes of parameters and buffers of a stage: of those that no stage before it holds, and of the others."""
    before = {id(tensor) for stage in split.stages[:rank] for tensor in _tensors(stage)}
    sizes = {id(tensor): tensor.numel() * tensor.element_size() for tensor in _tensors(split.stages[rank])}
    copies = sum(size for key, size in sizes.items() if key in before)
    return sum(sizes.values()) - copies, copies


def _tensors(stage: nn.Module) -> list[torch.Tensor]:
    return [*stage.parameters(), *stage.buffers()]


def _activations(split: SplitModel, rank: int) -> int:
    assert split.cut is not None
    work = split.partition.stage_work(split.cut.costs)[rank]
    return max((cost.activation_bytes for cost in work), default=0)


def _buffers(split: SplitModel, rank: int, workload: Workload) -> int:
    crossing = [sum(value.bytes for value in values) for values in split.boundaries]
    received = crossing[rank - 1] if rank else 0
    results = sum(value_bytes(node) for node in split.graph.output_nodes)
    is_last = rank == split.num_stages - 1
    if workload.schedule == "gpipe":  # torch's PipelineStage has buffers for every microbatch
        return workload.requests * (received + (results if is_last else crossing[rank]))
    if workload.num_ranks == 1:
        return 0
    return SLOTS * (max(crossing, default=0) + results + (0 if is_last else crossing[rank])) + received
