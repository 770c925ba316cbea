"""The captured forward as a graph of block calls and glue, with what each value depends on."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from dit_pipelining.capture import replay
from dit_pipelining.capture.branch_hooks import BranchHook
from dit_pipelining.capture.nodes import is_object, is_tensor, nodes_in
from dit_pipelining.capture.signature import CallInputs, ObjectTensor, complete_object
from dit_pipelining.capture.values import CHANGES_EACH_STEP, Questions


@dataclass(frozen=True, eq=False)
class BlockGraph:
    """One captured forward.

    Attributes:
        graph: FX graph in execution order. Placeholders carry `meta["input"]`, the input's path; block calls carry
            `meta["block"]`, the block's name; values that are tensors carry `meta["shape"]` and `meta["dtype"]`.
        blocks: the calls of the main chain, in execution order: what a Partition counts. The same block may occur
            more than once if the forward calls it more than once.
        side_blocks: all other block calls (hint blocks, text refiners); they go to the stage of their first consumer.
        main_input: name of the forward's first argument, the latents.
        output: the forward's return value, with nodes in the place of tensors.
        constants: tensors and objects the glue made from nothing, by their target in the graph.
        questions: what glue asked about input values; the graph is right for inputs that give the same answers.
        object_tensors: the tensors that the objects of a call hold when it has run: the caller's by path, those that glue
            made by their target in the graph.
        lora_scale: the factor for LoRA layers that the call asked for in its attention kwargs.
        signature: of the inputs the forward was captured with.
        hooks: that were on the blocks, and have to be when they run.
        hooked: the modules outside of blocks that run at every call, since hooks of the caller's are on or in them, and the
            names of what they compute with.
        draws: the function that draws random numbers in a block, if one does.
        handing: the blocks that give some of their arguments back as they are, which the graph passes around them.
    """

    graph: fx.Graph
    blocks: tuple[fx.Node, ...]
    side_blocks: tuple[fx.Node, ...]
    main_input: str
    output: Any
    constants: Mapping[str, Any]
    questions: tuple[Questions, ...]
    object_tensors: Mapping[str, tuple[ObjectTensor, ...]]
    lora_scale: float
    signature: Hashable
    hooks: tuple[BranchHook, ...] = ()
    hooked: Mapping[str, frozenset[str]] = field(default_factory=dict)
    handing: frozenset[str] = frozenset()
    draws: str = ""

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    @cached_property
    def output_nodes(self) -> list[fx.Node]:
        """The distinct tensors in the output, in order."""
        return [node for node in dict.fromkeys(nodes_in(self.output)) if is_tensor(node)]

    @cached_property
    def inputs_of(self) -> dict[fx.Node, frozenset[str]]:
        """For each value, the paths of the model inputs it depends on."""
        found: dict[fx.Node, frozenset[str]] = {}
        for node in self.graph.nodes:
            own = frozenset({node.meta["input"]}) if node.op == "placeholder" else frozenset()
            found[node] = own.union(*(found[source] for source in node.all_input_nodes))
        return found

    @cached_property
    def weights_of(self) -> dict[fx.Node, frozenset[str]]:
        """For each value, the names of the modules, parameters and buffers that computing it from the inputs needs."""
        found: dict[fx.Node, frozenset[str]] = {}
        for node in self.graph.nodes:
            found[node] = self.own_weights(node).union(*(found[source] for source in node.all_input_nodes))
        return found

    def own_weights(self, node: fx.Node) -> frozenset[str]:
        """The names of the modules, parameters and buffers that this very operation uses."""
        if node.op not in ("call_module", "get_attr") or node.target in self.constants:
            return frozenset()
        return self.hooked.get(str(node.target), frozenset({str(node.target)}))

    @cached_property
    def _after_hooks(self) -> set[fx.Node]:
        """The modules with hooks outside of blocks, and what is computed from them."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            is_hooked = node.op in ("call_module", "get_attr") and node.target in self.hooked
            if is_hooked or any(source in found for source in node.all_input_nodes):
                found.add(node)
        return found

    @cached_property
    def output_objects(self) -> list[fx.Node]:
        """Objects in the output that the forward made itself."""
        return [node for node in dict.fromkeys(nodes_in(self.output)) if "template" in node.meta]

    def changes_each_step(self, node: fx.Node) -> bool:
        """Whether a value depends on the latents or the time, which are new at every denoising step, or on a hook."""
        return node in self._after_hooks or any(self.is_new_each_step(path) for path in self.inputs_of[node])

    def is_new_each_step(self, path: str) -> bool:
        """Whether the input at this path is new at every denoising step."""
        name = path.split(".")[0]
        return name == self.main_input or bool(CHANGES_EACH_STEP.search(name))

    def matches(self, model: nn.Module, inputs: CallInputs) -> bool:
        """Whether the graph is right for these inputs: equal signature, and equal answers where glue looked at values."""
        return inputs.signature == self.signature and all(q.same_answers(model, inputs.leaves) for q in self.questions)

    def rebuild_output(self, tensors: Sequence[torch.Tensor], inputs: CallInputs) -> Any:
        """The forward's own return value from the tensors of `output_nodes`.

        Args:
            tensors: in the order of `output_nodes`.
            inputs: of the call, for a forward that returns the caller's objects or such that it made.
        """
        values: dict[fx.Node, Any] = dict(zip(self.output_nodes, tensors, strict=True))
        for node in self.output_objects:
            values[node] = self._made(node, inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.meta["input"] in inputs.objects:
                values[node] = inputs.objects[node.meta["input"]]

        def build(item: Any) -> Any:
            if isinstance(item, fx.Node):
                return values[item]
            if isinstance(item, replay.Rebuilt):
                return item.cls(**{name: build(part) for name, part in item.fields.items()})
            if isinstance(item, replay.Typed):
                return item.cls({name: build(part) for name, part in item.items.items()})
            if isinstance(item, torch.Size):
                return item
            if isinstance(item, list | tuple):
                return type(item)(build(part) for part in item)
            if isinstance(item, dict):
                return {name: build(part) for name, part in item.items()}
            return item

        return build(self.output)

    def complete_objects(self, inputs: CallInputs) -> None:
        """Tell the objects of a call that has run over ranks which tensors other ranks have put into theirs."""
        for path, value in inputs.objects.items():
            complete_object(value, self.object_tensors.get(path, ()))
        for node in self.output_objects:
            complete_object(self._made(node, inputs), self.object_tensors.get(node.meta["template"], ()))

    def _made(self, node: fx.Node, inputs: CallInputs) -> Any:
        """The object that glue made at this node during the call; one without data if that was on other ranks only."""
        template = self.constants[node.meta["template"]]
        if id(template) not in inputs.made:
            parts: Any = node.args[1]
            replay.instantiate(template, [self._made_part(part, inputs) for part in parts], inputs.made)
        return inputs.made[id(template)]

    def _made_part(self, node: fx.Node, inputs: CallInputs) -> Any:
        if "template" in node.meta:
            return self._made(node, inputs)
        if node.op == "placeholder" and node.meta["input"] in inputs.objects:
            return inputs.objects[node.meta["input"]]
        if is_object(node):  # a step into an object of the caller's
            owner, key = node.args
            step: Any = node.target
            return step(self._made_part(owner, inputs), key)  # type: ignore[arg-type]
        return torch.empty(node.meta["shape"], dtype=node.meta["dtype"], device="meta")
