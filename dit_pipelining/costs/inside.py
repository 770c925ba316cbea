"""What the ranks inside a stage share of its blocks: each computes and holds less, and waits for what the others send.

[Note: what a way costs]
Sequence parallelism divides all of a block's work, tensor parallelism its matrix products and attention only: norms and sums
run whole on each of its ranks. Each block then waits for what its dimensions send (`costs/collectives.py`), on hidden states
that sequence parallelism has divided; HSDP gathers the next block's weights while one computes, so the slower of both counts.
The glue before and after the blocks is not divided.

Memory: tensor parallelism divides the weights of the layers that its plan cuts, HSDP those of whole blocks, two of which it
holds whole. Sequence parallelism divides activations and what crosses between stages; tensor parallelism neither.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.comm.layout import ONE_RANK, Layout
from dit_pipelining.costs.collectives import hsdp_seconds, ring_seconds, tensor_seconds, ulysses_seconds
from dit_pipelining.costs.devices import DeviceProfile, Link
from dit_pipelining.costs.machine import Machine
from dit_pipelining.costs.model_costs import Section, model_costs, sections
from dit_pipelining.costs.roofline import Roofline
from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.tensor_plans import tensor_plan
from partitioners import BlockCost, ModelCosts

WHOLE_BLOCKS = 2
"""Blocks whose weights HSDP holds whole: the one that computes, and the next."""


@dataclass(frozen=True)
class BlockWork:
    """One call of a block on one GPU.

    Attributes:
        matrix_seconds: of matrix products, convolutions and attention.
        other_seconds: of everything else.
        weights, activations: bytes.
        cut_weights: those of the weights that tensor parallelism divides.
        hidden: bytes of the hidden states that leave it.
        reductions: sums over the ranks of tensor parallelism.
    """

    matrix_seconds: float
    other_seconds: float
    weights: int
    cut_weights: int
    activations: int
    hidden: int
    reductions: int = 2

    def held(self, tensor: int) -> float:
        """Bytes of weights on each rank of tensor parallelism."""
        return self.weights - self.cut_weights + self.cut_weights / tensor

    def seconds(self, layout: Layout, link: Link) -> tuple[float, dict[str, float]]:
        """What a rank computes, and what it waits for, by dimension."""
        compute = (self.matrix_seconds / layout.tensor + self.other_seconds) / layout.sequence
        return compute, {
            "ulysses": ulysses_seconds(self.hidden / layout.ring / layout.tensor, layout.ulysses, link),
            "ring": ring_seconds(self.hidden / layout.ulysses / layout.tensor, layout.ring, link),
            "tensor": tensor_seconds(self.hidden / layout.sequence, layout.tensor, link, self.reductions),
        }

    def gather_seconds(self, layout: Layout, shards: int, link: Link) -> float:
        """Seconds until HSDP has the block's weights whole."""
        return hsdp_seconds(self.held(layout.tensor), shards, link)


def rank_costs(
    graph: BlockGraph,
    model: nn.Module,
    machine: Machine,
    layout: Layout = ONE_RANK,
    shards: int = 1,
    blocks: Sequence[str] | None = None,
) -> ModelCosts:
    """Costs of a call on one of the ranks that share each stage, for a run and for what is shown of one.

    Args:
        graph: of the whole call, captured with `count_work` on a model of which nothing is cut.
        model: that model, with weights or without.
        machine: its ranks.
        layout: how many ranks share what.
        shards: ranks over which HSDP keeps the weights of each block.
        blocks: names of the model's blocks, see `find_blocks`.

    Raises:
        ConfigError: the machine's profile is of another model.
    """
    costs = model_costs(graph, model, machine.timing)
    if layout.inside == shards == 1:
        return costs
    device = machine.device_of(machine.ranks[0])
    works = block_works(graph, model, costs, device, blocks)
    return shared_inside(costs, works, layout, shards, device.link(machine.topology))


def block_works(
    graph: BlockGraph, model: nn.Module, costs: ModelCosts, device: DeviceProfile, blocks: Sequence[str] | None = None
) -> tuple[BlockWork, ...]:
    """What each block of the main chain does.

    Args:
        graph: of one call, captured with `count_work`.
        model: with weights or without.
        costs: of the model on one GPU, from `model_costs`.
        device: by whose data sheet each block's seconds are told apart.
        blocks: names of the model's blocks, see `find_blocks`.
    """
    timing = Roofline(device)
    cut = cut_tensors(model, blocks)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters() if name in cut}
    hidden = max([costs.prologue.boundary_bytes, *(cost.boundary_bytes for cost in costs.blocks)])
    _, *parts, _ = sections(graph, model)
    works = []
    for node, part, cost in zip(graph.blocks, parts, costs.blocks, strict=True):
        other = cost.seconds * _other_share(part, timing)
        called = tuple(f"{module}." for module in _called(part.nodes))
        works.append(
            BlockWork(
                matrix_seconds=cost.seconds - other,
                other_seconds=other,
                weights=cost.parameter_bytes,
                cut_weights=sum(size for name, size in sizes.items() if name.startswith(called)),
                activations=cost.activation_bytes,
                hidden=cost.boundary_bytes or hidden,
                reductions=_reductions(model.get_submodule(str(node.target))),
            )
        )
    return tuple(works)


def shared_inside(costs: ModelCosts, works: Sequence[BlockWork], layout: Layout, shards: int, link: Link) -> ModelCosts:
    """Costs of a call on one of the ranks that share each stage; see [Note: what a way costs].

    Args:
        costs: of the call on one GPU.
        works: of its blocks.
        layout: how many ranks share what.
        shards: ranks over which HSDP keeps the weights of each block.
        link: between them.
    """
    blocks = []
    for cost, work in zip(costs.blocks, works, strict=True):
        compute, sending = work.seconds(layout, link)
        kept = work.held(layout.tensor) / shards
        gathered = WHOLE_BLOCKS * (work.held(layout.tensor) - kept)
        blocks.append(
            replace(
                cost,
                seconds=max(compute + sum(sending.values()), work.gather_seconds(layout, shards, link)),
                parameter_bytes=math.ceil(kept),
                activation_bytes=math.ceil(cost.activation_bytes / layout.sequence + gathered),
                boundary_bytes=math.ceil(cost.boundary_bytes / layout.sequence),
            )
        )
    prologue, epilogue = (_glue(cost, layout) for cost in (costs.prologue, costs.epilogue))
    return replace(costs, blocks=tuple(blocks), prologue=prologue, epilogue=epilogue)


def held_bytes(model: nn.Module, layout: Layout, shards: int, blocks: Sequence[str] | None = None) -> dict[str, float]:
    """Bytes that one of the ranks that share each stage holds of each parameter and buffer, by name."""
    cut = cut_tensors(model, blocks) if layout.tensor > 1 else frozenset()
    sharded = tuple(f"{name}." for name in find_blocks(model, blocks))
    parameters = {
        name: parameter.nbytes / (layout.tensor if name in cut else 1) / (shards if name.startswith(sharded) else 1)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    return parameters | {name: buffer.nbytes for name, buffer in model.named_buffers(remove_duplicate=False)}


def parameter_bytes(
    model: nn.Module, layout: Layout, shards: int, blocks: Sequence[str] | None = None
) -> dict[str, float]:
    """The same of each parameter once, whatever names it has, without buffers."""
    held = held_bytes(model, layout, shards, blocks)
    return {name: held[name] for name, _ in model.named_parameters()}


def cut_tensors(model: nn.Module, blocks: Sequence[str] | None = None) -> frozenset[str]:
    """Names of the tensors that tensor parallelism divides; none where it cannot cut the model."""
    try:
        return tensor_plan(model, find_blocks(model, blocks)).cut_tensors()
    except ConfigError:
        return frozenset()


def _glue(cost: BlockCost, layout: Layout) -> BlockCost:
    return replace(cost, boundary_bytes=math.ceil(cost.boundary_bytes / layout.sequence))


def _other_share(part: Section, timing: Roofline) -> float:
    """Share of a block's time in which it makes no matrix products."""
    times = [(own, timing.operation_seconds(own) * count) for own, count in part.operations.items()]
    total = sum(seconds for _, seconds in times)
    return sum(seconds for own, seconds in times if not own.flops) / total if total else 0.0


def _called(nodes: Sequence[fx.Node]) -> list[str]:
    return [str(node.target) for node in nodes if node.op == "call_module"]


def _reductions(block: nn.Module) -> int:
    """Sums that tensor parallelism needs in a block: after each attention, and after the feed-forward."""
    attentions = [module for module in block.modules() if hasattr(module, "to_q") or hasattr(module, "to_qkv")]
    return 1 + max(len(attentions), 1)
