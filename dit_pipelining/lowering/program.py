"""What a stage runs for one captured graph: its part of the forward, compiled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from dit_pipelining.capture.code import Function, compile_nodes
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.errors import SplitError
from dit_pipelining.lowering.boundary import BoundaryValue, StagePlan
from dit_pipelining.lowering.invariant import InvariantGroup, split_invariant
from dit_pipelining.torch_internals import version


@dataclass(frozen=True, eq=False)
class StageProgram:
    """What a stage runs for one captured graph.

    Attributes:
        graph: the captured forward.
        plan: the stage's part of it.
        received: what comes from the stage before.
        sent: what goes to the next stage; empty for the last one.
        messages: bytes of the tensors that cross each boundary of the pipeline.
        inputs: paths of the model inputs the program reads at every step.
        groups: what it computes once per denoising loop.
    """

    graph: BlockGraph
    plan: StagePlan
    received: tuple[BoundaryValue, ...]
    sent: tuple[BoundaryValue, ...]
    messages: tuple[tuple[int, ...], ...]
    inputs: tuple[str, ...]
    groups: tuple[InvariantGroup, ...]
    function: Function

    @property
    def blocks(self) -> list[fx.Node]:
        """The calls of blocks."""
        mine = set(self.plan.computed)
        return [node for node in self.graph.blocks if node in mine]

    def run(
        self, root: nn.Module, received: Sequence[torch.Tensor], leaves: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Run on tensors as they were sent; returns tensors to send, or the output tensors of the last stage."""
        arguments = [value.from_wire(tensor) for value, tensor in zip(self.received, received, strict=True)]
        own = [leaves[path] for path in self.inputs]
        for group in self.groups:
            own += group.kept.get(root, leaves)
        before = _versions(own)
        outputs = self.function(root, *arguments, *own)
        self._check(outputs)
        if _versions(own) != before:
            raise SplitError(
                f"while stage {self.plan.index} ran, something (a hook on one of its blocks?) wrote in place into what each "
                "stage computes for itself, and mostly once for all steps, so other stages do not see it. Let the hook return "
                "new tensors."
            )
        if not self.sent:
            return outputs
        return tuple(value.to_wire(tensor) for value, tensor in zip(self.sent, outputs, strict=True))

    def _check(self, outputs: Sequence[torch.Tensor]) -> None:
        """Check that the stage has made what was recorded, which the next one has memory for."""
        for node, tensor in zip(self.plan.sent, outputs, strict=True):
            expected = node.meta["shape"], node.meta["dtype"]
            if (tuple(tensor.shape), tensor.dtype) != expected:
                raise SplitError(
                    f"stage {self.plan.index} made {node.name!r} as {tuple(tensor.shape)} {tensor.dtype}, where the model "
                    f"makes it as {expected[0]} {expected[1]}. A hook, or a layer that was exchanged, changes the shape or "
                    "dtype of what a block gives: let it keep them."
                )


def _versions(values: Sequence[Any]) -> list[int]:
    return [version(value) for value in values if isinstance(value, torch.Tensor)]


def build_program(graph: BlockGraph, plans: Sequence[StagePlan], index: int) -> StageProgram:
    """Compile the part of stage `index` of a captured graph."""
    plan = plans[index]
    groups, nodes = split_invariant(graph, plan.computed, plan.sent)
    inputs = [node for node in nodes if node.op == "placeholder"]
    hoisted = [value for group in groups for value in group.values]
    function = compile_nodes(nodes, plan.sent, [*plan.received, *inputs, *hoisted], graph.constants)
    return StageProgram(
        graph=graph,
        plan=plan,
        received=plans[index - 1].boundary if index else (),
        sent=plan.boundary if index < len(plans) - 1 else (),
        messages=tuple(tuple(value.bytes for value in own.boundary) for own in plans[:-1]),
        inputs=tuple(node.meta["input"] for node in inputs),
        groups=tuple(groups),
        function=function,
    )
