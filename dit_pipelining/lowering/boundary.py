"""What each stage computes, what crosses each boundary, and what is recomputed instead.

[Note: send or recompute]
Values derived from block outputs have to cross. Values derived from the inputs alone (the prologue, and side blocks that
hang on it) could be computed by any stage, since every rank has the inputs; the first stage that needs one computes it.
For a later stage that needs it too:
- no parameters and no blocks behind it (rotary tables, masks, reshapes): recomputed.
- small (under 1% of the hidden state's bytes) and changing from step to step, or with a noticeable share of the model's
  parameters behind it: sent. Wan's time projection is 1.1% of the 14B model, and its result 0.1 MB.
- large, with a large share of the parameters behind it (a stack of hint blocks): sent.
- otherwise recomputed, from inputs to which the same rule applies. Wan's text projection has 0.3% of the parameters, and
  since it is the same at every step it is computed once per request.
Lowering another signature of the same model must not need weights that a stage has not loaded: there, a value is computed
only where its weights are held, and sent otherwise. So a call that skips all blocks of the first or the last stage (skip-layer
guidance) still begins in the first one, which has the weights of the prologue, and ends in the last one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from dit_pipelining.capture import replay
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.nodes import is_tensor, value_bytes
from partitioners import Partition

SMALL_SHARE_OF_HIDDEN = 0.01
NOTICEABLE_SHARE_OF_PARAMETERS = 0.005
LARGE_SHARE_OF_PARAMETERS = 0.05


@dataclass(frozen=True)
class BoundaryValue:
    """One tensor that crosses a boundary.

    Attributes:
        name: of the value in the captured graph.
        shape, dtype: as the next stage receives it.
        order: order of the dimensions in which the tensor is dense in memory, from the outermost on: it is sent in
            this order, so that it arrives with the strides it had.
        relayed: the stage before the boundary only passes it on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    relayed: bool = False

    @property
    def bytes(self) -> int:
        return self.wire_numel * self.dtype.itemsize

    @property
    def wire_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self.order)

    @property
    def wire_numel(self) -> int:
        return torch.Size(self.shape).numel()

    def to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """The contiguous tensor that is sent; no copy for a tensor that is dense in memory."""
        return tensor.permute(self.order).contiguous()

    def from_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the next stage uses it, a view."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return tensor.permute(inverse)


def with_plain_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of a new one, if it is contiguous.

    A dimension of size 1 can have any stride, as a slice of a batch has, and torch's schedules compare strides.
    """
    return tensor.flatten().view(tensor.shape) if tensor.is_contiguous() else tensor


@dataclass(frozen=True)
class StagePlan:
    """What one stage does.

    Attributes:
        index: of the stage.
        received: values that come from the stage before, in the order they are sent.
        computed: nodes the stage runs, in execution order.
        sent: values that go to the next stage, in order; for the last stage the output tensors.
        weights: names of the modules, parameters and buffers the stage needs.
    """

    index: int
    received: tuple[fx.Node, ...]
    computed: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]
    weights: frozenset[str]

    @cached_property
    def boundary(self) -> tuple[BoundaryValue, ...]:
        """What crosses to the next stage."""
        return tuple(_boundary_value(node, relayed=node in set(self.received)) for node in self.sent)


def plan_stages(
    graph: BlockGraph,
    partition: Partition,
    parameter_counts: Mapping[str, int],
    held: Sequence[frozenset[str]] | None = None,
) -> list[StagePlan]:
    """Distribute a captured graph over the stages of a partition.

    Args:
        graph: the captured forward; the partition counts its `blocks`.
        partition: number of blocks per stage.
        parameter_counts: number of parameters by name of module or parameter, as in `BlockGraph.weights_of`.
        held: names of the weights each stage already holds, when the same model was lowered before.
    """
    return _Planner(graph, partition, parameter_counts, held).plan()


class _Planner:
    def __init__(
        self,
        graph: BlockGraph,
        partition: Partition,
        parameter_counts: Mapping[str, int],
        held: Sequence[frozenset[str]] | None,
    ) -> None:
        self.graph, self.partition, self.counts, self.held = graph, partition, parameter_counts, held
        self.order = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.stages = range(partition.num_stages)
        self.stage_of_block = {node: partition.stage_of(i) for i, node in enumerate(graph.blocks)}
        self.total = sum(parameter_counts.get(name, 0) for name in frozenset().union(*graph.weights_of.values()))
        self.hidden_bytes = max((value_bytes(n) for n in self._block_values()), default=0)
        self.makers = self._makers()
        self.level = self._levels()
        self.home = self._homes()

    def plan(self) -> list[StagePlan]:
        plans: list[StagePlan] = []
        sent = self._sorted(self.graph.output_nodes)
        for stage in reversed(self.stages):
            if stage == self.stages[-1]:
                sent = [*sent, *self.graph.output_objects]
            roots = [*sent, *(node for node, own in self.stage_of_block.items() if own == stage)]
            computed, received = self._closure(roots, stage)
            outputs = self.graph.output_nodes if stage == self.stages[-1] else sent
            weights = frozenset().union(*map(self.graph.own_weights, computed))
            plans.append(StagePlan(stage, tuple(received), tuple(computed), tuple(outputs), weights))
            sent = received
        return plans[::-1]

    # ---- where values come into being ---------------------------------------------------------------------------------

    def _block_values(self) -> list[fx.Node]:
        """Tensors that block calls return."""
        calls = set(self.graph.blocks)
        parts = [u for call in calls for u in call.users if u.target is replay.getitem and not is_tensor(call)]
        return [*calls, *parts]

    def _levels(self) -> dict[fx.Node, int]:
        """The stage that computes each value derived from blocks; -1: the prologue.

        It is that of the last block behind it, or the first after that which holds the weights of this glue.
        """
        level: dict[fx.Node, int] = {}
        for node in self.graph.graph.nodes:
            own = self.stage_of_block.get(node, -1)
            level[node] = max([own, *(level[source] for source in node.all_input_nodes)])
            if level[node] >= 0:  # a write waits for what reads the memory before it
                level[node] = max([level[node], *(level.get(reader, -1) for reader in node.meta.get("writes", ()))])
                level[node] = self._holding_stage(node, level[node], level)
        return level

    def _holding_stage(self, node: fx.Node, stage: int, level: Mapping[fx.Node, int]) -> int:
        """The first stage from `stage` on that holds or receives what this node takes beside values of blocks."""
        prologue = [source for source in node.all_input_nodes if level[source] < 0]
        able = (own for own in self.stages[stage:] if _are_there(prologue, own, self.makers))
        return next((own for own in able if self._holds_own(node, own)), stage)

    def _makers(self) -> dict[fx.Node, frozenset[int]]:
        """The stages that can compute each prologue value: they hold its weights, and have or receive its inputs."""
        makers: dict[fx.Node, frozenset[int]] = {}
        for node in self.graph.graph.nodes:
            sources = node.all_input_nodes
            if node not in self.stage_of_block and all(source in makers for source in sources):
                able = (own for own in self.stages if self._holds_own(node, own) and _are_there(sources, own, makers))
                makers[node] = frozenset(able)
        return makers

    def _holds_own(self, node: fx.Node, stage: int) -> bool:
        """Whether a stage holds the weights that this very node uses."""
        return self._holds(stage, self.graph.own_weights(node))

    def _holds(self, stage: int, weights: frozenset[str]) -> bool:
        return self.held is None or all(holds(self.held[stage], name) for name in weights)

    def _homes(self) -> dict[fx.Node, int]:
        """The stage that computes each prologue value: the first that needs it, or the last one before that can."""
        outputs = {*self.graph.output_nodes, *self.graph.output_objects}
        home: dict[fx.Node, int] = {}
        for node in reversed(self.graph.graph.nodes):
            if self.level[node] >= 0:
                continue
            needed = [self.level[user] if self.level[user] >= 0 else home.get(user) for user in node.users]
            needed += [self.stages[-1]] if node in outputs else []
            if stages := [stage for stage in needed if stage is not None]:
                home[node] = max((own for own in self.makers[node] if own <= min(stages)), default=min(stages))
        return home

    # ---- what a stage runs and what it receives -----------------------------------------------------------------------

    def _closure(self, roots: Sequence[fx.Node], stage: int) -> tuple[list[fx.Node], list[fx.Node]]:
        computed: set[fx.Node] = set()
        received: set[fx.Node] = set()
        pending = list(roots)
        while pending:
            node = pending.pop()
            if node in computed or node in received:
                continue
            if self._is_received(node, stage):
                received.add(node)
            else:
                computed.add(node)
                pending += node.all_input_nodes
        return self._sorted(computed), self._sorted(received)

    def _is_received(self, node: fx.Node, stage: int) -> bool:
        if self.level[node] >= 0:
            return self.level[node] < stage and is_tensor(node) and not _is_overwritten_view(node)
        if self.home[node] >= stage or not _can_cross(node):
            # A home at or after this stage: this stage relays what a later one needs only if an earlier one made it.
            return False
        weights = self.graph.weights_of[node]
        return not self._holds(stage, weights) or self._is_worth_sending(node, weights)

    def _is_worth_sending(self, node: fx.Node, weights: frozenset[str]) -> bool:
        parameters = sum(self.counts.get(name, 0) for name in weights)
        if not parameters:
            return False
        share = parameters / max(self.total, 1)
        if value_bytes(node) < SMALL_SHARE_OF_HIDDEN * self.hidden_bytes:
            return share > NOTICEABLE_SHARE_OF_PARAMETERS or self.graph.changes_each_step(node)
        return share > LARGE_SHARE_OF_PARAMETERS

    def _sorted(self, nodes: set[fx.Node] | Sequence[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)


def holds(held: frozenset[str], name: str) -> bool:
    """Whether a module, parameter or buffer of this name is among those that are held, or within one of them."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in held for end in range(1, len(parts) + 1))


def _are_there(values: Sequence[fx.Node], stage: int, makers: Mapping[fx.Node, frozenset[int]]) -> bool:
    """Whether a stage can compute prologue values, or receive them from one before that can."""
    return all(
        stage in makers[node] or (_can_cross(node) and min(makers[node], default=stage) < stage) for node in values
    )


def _can_cross(node: fx.Node) -> bool:
    """Whether a prologue value can be sent; of one that is written into, the stage before may have written already."""
    if node.op in ("placeholder", "get_attr") or not is_tensor(node):
        return False
    return not (node.meta.get("overwritten") or "writes" in node.meta)


def _is_overwritten_view(node: fx.Node) -> bool:
    """Whether a write will have to show in this view: the stage that writes has to take the view of its own copy."""
    return bool(node.meta.get("overwritten")) and _is_view(node, node.meta["memory"])


def _is_view(node: fx.Node, memory: int | None) -> bool:
    if node.op == "call_module" or node.target is replay.written:
        return False
    return any(
        source.meta["memory"] == memory if is_tensor(source) else _is_view(source, memory)
        for source in node.all_input_nodes
    )


def _boundary_value(node: fx.Node, relayed: bool) -> BoundaryValue:
    shape, stride = node.meta["shape"], node.meta["stride"]
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    return BoundaryValue(node.name, shape, node.meta["dtype"], tuple(order), relayed)
