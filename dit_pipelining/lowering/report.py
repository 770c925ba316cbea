"""What there is to say about a split, as plain numbers: what `dit-pipelining show` draws and a run prints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx, nn

from dit_pipelining.costs.model_costs import model_costs
from dit_pipelining.lowering.boundary import BoundaryValue
from dit_pipelining.lowering.names import block_ranges, origin
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.lowering.stage import StageModule
from partitioners import ModelCosts


@dataclass(frozen=True)
class BlockReport:
    """One block of the main chain.

    Attributes:
        name: in the model.
        kind: name of its class.
        stage: that runs it.
        parameter_bytes, flops, seconds: of one call, with the glue that counts with it.
    """

    name: str
    kind: str
    stage: int
    parameter_bytes: int
    flops: int
    seconds: float


@dataclass(frozen=True)
class StageReport:
    """One stage of one transformer.

    Attributes:
        stage: its index.
        first_block, end_block: its blocks, counted over the main chain, `end_block` excluded.
        blocks: their names, runs written as one: `transformer_blocks 0-13`.
        side_blocks: likewise for blocks beside the main chain (refiners, hint blocks).
        parameters, parameter_bytes: held by the stage.
        flops: of one forward, with what the stage recomputes.
    """

    stage: int
    first_block: int
    end_block: int
    blocks: tuple[str, ...]
    side_blocks: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    flops: int


@dataclass(frozen=True)
class CrossingReport:
    """One tensor that crosses a boundary.

    Attributes:
        name: of the value in the captured graph.
        origin: what made it, in the model's words: `blocks.9`, or `add of time_embedder.linear_2, ...`.
        shape, dtype, bytes: of the tensor.
        relayed: the stage before the boundary only passes it on.
    """

    name: str
    origin: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    relayed: bool


@dataclass(frozen=True)
class TransformerReport:
    """A transformer, cut.

    Attributes:
        names: of the pipeline's components that are cut like this.
        model_class: of the transformer.
        parameters, parameter_bytes: of the whole transformer.
        unused_parameters: that no stage holds, since the forward does not use them.
        flops: of the forward that was captured.
        partition: blocks per stage.
        stages: one entry per stage.
        blocks: one entry per block, in execution order.
        boundaries: what crosses from stage i to stage i + 1.
    """

    names: tuple[str, ...]
    model_class: str
    parameters: int
    parameter_bytes: int
    unused_parameters: int
    flops: int
    partition: tuple[int, ...]
    stages: tuple[StageReport, ...]
    blocks: tuple[BlockReport, ...]
    boundaries: tuple[tuple[CrossingReport, ...], ...]

    @property
    def flops_imbalance(self) -> float:
        """FLOPs of the busiest stage over the mean: 1.0 is perfect balance."""
        return _max_over_mean([stage.flops for stage in self.stages])

    @property
    def largest_stage(self) -> float:
        """Parameters of the largest stage over an even share of the model's."""
        return max(map(self.parameter_ratio, self.stages))

    @property
    def extra_parameters(self) -> float:
        """Parameters that more than one stage holds, counted once less than they are held, over the model's."""
        held = sum(stage.parameters for stage in self.stages)
        return (held - self.parameters + self.unused_parameters) / self.parameters

    def parameter_ratio(self, stage: StageReport) -> float:
        """A stage's parameters over an even share of the model's."""
        return stage.parameters * len(self.stages) / self.parameters

    def flops_share(self, stage: StageReport) -> float:
        """A stage's part of all FLOPs that the stages do."""
        return stage.flops / max(sum(other.flops for other in self.stages), 1)


def report_split(split: SplitModel, names: Sequence[str], costs: ModelCosts | None = None) -> TransformerReport:
    """What a split model looks like.

    Args:
        split: from `split_model`, with weights or without.
        names: of the pipeline's components that it stands for.
        costs: of its blocks. Default: with seconds at a nominal rate.
    """
    stages = tuple(_stage(split, stage) for stage in split.stages)
    held = {name: p.numel() for stage in split.stages for name, p in stage.named_parameters()}
    parameters, size = _count(split.model)
    nodes = {node.name: node for node in split.graph.nodes}
    return TransformerReport(
        names=tuple(names),
        model_class=type(split.model).__name__,
        parameters=parameters,
        parameter_bytes=size,
        unused_parameters=parameters - sum(held.values()),
        flops=_flops(split.graph.nodes),
        partition=split.partition.counts,
        stages=stages,
        blocks=_blocks(split, costs or model_costs(split.graph, split.model)),
        boundaries=tuple(tuple(_crossing(value, nodes) for value in values) for values in split.boundaries),
    )


def _blocks(split: SplitModel, costs: ModelCosts) -> tuple[BlockReport, ...]:
    def block(index: int, name: str) -> BlockReport:
        cost = costs.blocks[index]
        kind = type(split.model.get_submodule(name)).__name__
        stage = split.partition.stage_of(index)
        return BlockReport(name, kind, stage, cost.parameter_bytes, cost.flops, cost.seconds)

    return tuple(block(index, node.meta["block"]) for index, node in enumerate(split.graph.blocks))


def _stage(split: SplitModel, stage: StageModule) -> StageReport:
    start, end = split.partition.ranges[stage.stage_index]
    computed = stage.programs[id(split.graph)].plan.computed
    side = set(split.graph.side_blocks)
    parameters, size = _count(stage)
    return StageReport(
        stage=stage.stage_index,
        first_block=start,
        end_block=end,
        blocks=block_ranges(node.meta["block"] for node in split.graph.blocks[start:end]),
        side_blocks=block_ranges(node.meta["block"] for node in computed if node in side),
        parameters=parameters,
        parameter_bytes=size,
        flops=_flops(computed),
    )


def _crossing(value: BoundaryValue, nodes: dict[str, fx.Node]) -> CrossingReport:
    dtype = str(value.dtype).removeprefix("torch.")
    return CrossingReport(value.name, origin(nodes[value.name]), value.shape, dtype, value.bytes, value.relayed)


def _count(module: nn.Module) -> tuple[int, int]:
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)


def _flops(nodes: Iterable[fx.Node]) -> int:
    return sum(node.meta.get("flops", 0) for node in nodes)


def _max_over_mean(numbers: Sequence[int]) -> float:
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0
