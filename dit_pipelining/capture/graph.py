"""The captured forward as a graph of block calls and glue, with what each value depends on."""

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from dit_pipelining.capture import replay
from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.capture.branch_hooks import BranchHook, asked_hooks, hooked
from dit_pipelining.capture.casting import cast_for_calls
from dit_pipelining.capture.chain import main_chain
from dit_pipelining.capture.code import compile_nodes
from dit_pipelining.capture.hooks import refuse_hooks
from dit_pipelining.capture.kept import KeptFunction
from dit_pipelining.capture.record import Record
from dit_pipelining.capture.signature import (
    CallInputs,
    ObjectTensor,
    complete_object,
    first_argument,
    flatten_inputs,
)
from dit_pipelining.capture.state import GlueState
from dit_pipelining.capture.step_caches import step_hooks, without_step_hooks
from dit_pipelining.capture.trace import trace
from dit_pipelining.capture.values import CHANGES_EACH_STEP, Questions
from dit_pipelining.errors import BlocksNotFoundError, ConfigError


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

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    @cached_property
    def output_nodes(self) -> list[fx.Node]:
        """The distinct tensors in the output, in order."""
        return [node for node in dict.fromkeys(_nodes_in(self.output)) if is_tensor(node)]

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
            own: frozenset[str] = frozenset()
            if node.op in ("call_module", "get_attr") and node.target not in self.constants:
                own = frozenset({str(node.target)})
            found[node] = own.union(*(found[source] for source in node.all_input_nodes))
        return found

    @cached_property
    def output_objects(self) -> list[fx.Node]:
        """Objects in the output that the forward made itself."""
        return [node for node in dict.fromkeys(_nodes_in(self.output)) if "template" in node.meta]

    def changes_each_step(self, node: fx.Node) -> bool:
        """Whether a value depends on the latents or the time, which are new at every denoising step."""
        return any(self.is_new_each_step(path) for path in self.inputs_of[node])

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


def capture(
    model: nn.Module,
    kwargs: Mapping[str, Any],
    blocks: Sequence[str] | None = None,
    forward: Callable[..., Any] | None = None,
    count_work: bool = False,
) -> BlockGraph:
    """Capture `model.forward(**kwargs)`.

    Args:
        model: with weights or without (parameters on the meta device); on CPU or CUDA.
        kwargs: the call's inputs. Tensor values matter only where the glue looks at them (masks, lengths).
        blocks: names of blocks, see `find_blocks`.
        forward: the bound forward to record. Default: `model.forward`.
        count_work: note what every node would cost to run, see `trace`.

    Raises:
        BlocksNotFoundError: the model has no block list, or the forward calls none of the blocks.
        CaptureError: the glue cannot be recorded; names the line of the model.
        ConfigError: the model has hooks (caches, casting, offloading).
    """
    names = find_blocks(model, blocks)
    refuse_hooks(model)
    inputs = flatten_inputs(kwargs)
    forward = forward or model.forward
    main_input = first_argument(forward)
    hooks = asked_hooks(model)
    with without_step_hooks(model), cast_for_calls(model), hooked(model, hooks):
        record = trace(model, forward, names, inputs, main_input, count_work)
    questions = _questions(record)
    live = _live_nodes(record.graph, record.output)
    for node in reversed(list(record.graph.nodes)):
        if node not in live:
            record.graph.erase_node(node)
    calls = [node for node in record.graph.nodes if "block" in node.meta]
    if not calls:
        raise BlocksNotFoundError(
            f"the forward of {type(model).__name__} calls none of its blocks ({', '.join(names[:3])}, ...) with these "
            "inputs. Name the blocks it does call with blocks=[...]."
        )
    chain = main_chain(record.graph, calls, main_input)
    graph = BlockGraph(
        graph=record.graph,
        blocks=tuple(chain),
        side_blocks=tuple(call for call in calls if call not in set(chain)),
        main_input=main_input,
        output=record.output,
        constants=record.constants,
        questions=questions,
        object_tensors=record.object_tensors,
        lora_scale=record.lora_scale,
        signature=inputs.signature,
        hooks=hooks,
    )
    _check_step_hooks(model, graph, names)
    return graph


def _check_step_hooks(model: nn.Module, graph: BlockGraph, blocks: Iterable[str]) -> None:
    """Check that each module that keeps something from step to step runs at every step, as one call or inside of one.

    Raises:
        ConfigError: names the module that does not.
    """
    calls = {str(node.target): node for node in graph.graph.nodes if node.op == "call_module"}
    owners = {*calls, *blocks}
    for name in step_hooks(model):
        parts = name.split(".")
        owner = next((own for n in range(len(parts), 0, -1) if (own := ".".join(parts[:n])) in owners), None)
        if owner is None or (owner in calls and not graph.changes_each_step(calls[owner])):
            raise ConfigError(
                f"the cache of {type(model).__name__} is on {name!r}, which is not a call of its own at every step: a split "
                "model computes what does not change once, and on each rank that needs it. Name modules within blocks in the "
                "cache's configuration."
            )


@dataclass
class CaptureCache:
    """Graphs of one model, one per signature, state of its plain values and set of answers about values.

    A question about a tensor on CUDA costs a host sync, once per tensor: the denoising loop passes the same ones again.
    """

    model: nn.Module
    blocks: Sequence[str] | None = None
    forward: Callable[..., Any] | None = None
    count_work: bool = False
    before_capture: Callable[[], None] | None = None
    graphs: dict[Hashable, list[BlockGraph]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def _state(self) -> GlueState:
        return GlueState(self.model, find_blocks(self.model, self.blocks))

    def get(self, kwargs: Mapping[str, Any], inputs: CallInputs | None = None) -> BlockGraph:
        inputs = inputs or flatten_inputs(kwargs)
        with self._lock:
            key = (inputs.signature, self.model.training, self._state.now(), asked_hooks(self.model))
            known = self.graphs.setdefault(key, [])
            for graph in known:
                if graph.matches(self.model, inputs):
                    return graph
            if self.before_capture is not None:
                self.before_capture()
            graph = capture(self.model, kwargs, self.blocks, self.forward, self.count_work)
            known.append(graph)
            return graph

    def of_copy(self, model: nn.Module) -> "CaptureCache":
        """The same graphs for a copy of the model."""
        graphs = {key: list(known) for key, known in self.graphs.items()}
        return CaptureCache(model, self.blocks, model.forward, self.count_work, self.before_capture, graphs)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything they are computed from."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is known to be a tensor (and not a tuple, an object or a number)."""
    return "shape" in node.meta


def value_bytes(node: fx.Node) -> int:
    """Bytes of a tensor value; 0 for values that are no tensors."""
    if not is_tensor(node):
        return 0
    dtype: torch.dtype = node.meta["dtype"]
    return math.prod(node.meta["shape"]) * dtype.itemsize


def _nodes_in(item: Any) -> Iterator[fx.Node]:
    if isinstance(item, fx.Node):
        yield item
    elif isinstance(item, replay.Rebuilt):
        yield from _nodes_in(item.fields)
    elif isinstance(item, replay.Typed):
        yield from _nodes_in(item.items)
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _nodes_in(part)
    elif isinstance(item, dict):
        for part in item.values():
            yield from _nodes_in(part)


def _questions(record: Record) -> tuple[Questions, ...]:
    """The questions a trace asked, compiled into one function per set of inputs."""
    groups: dict[tuple[str, ...], list[tuple[fx.Node, Any]]] = {}
    for node, answer in record.asked:
        sources = {source.meta["input"] for source in ancestors([node]) if source.op == "placeholder"}
        if sources or _weights_behind([node], record):
            groups.setdefault(tuple(sorted(sources)), []).append((node, answer))
    made = []
    for inputs, asked in groups.items():
        askers = [node for node, _ in asked]
        needed = ancestors(askers)
        nodes = [node for node in record.graph.nodes if node in needed]
        arguments = {node.meta["input"]: node for node in nodes if node.op == "placeholder"}
        function = compile_nodes(nodes, askers, [arguments[path] for path in inputs], record.constants)
        made.append(
            Questions(
                KeptFunction(inputs, _weights_behind(askers, record), function), tuple(answer for _, answer in asked)
            )
        )
    return tuple(made)


def _weights_behind(nodes: Iterable[fx.Node], record: Record) -> tuple[str, ...]:
    """Names of the model's own tensors that these nodes are computed from."""
    targets = {str(node.target) for node in ancestors(nodes) if node.op == "get_attr"}
    return tuple(sorted(targets - set(record.constants)))


def _live_nodes(graph: fx.Graph, output: Any) -> set[fx.Node]:
    """What the output needs, all placeholders, and blocks that act on an object (a KV cache)."""
    roots = [*_nodes_in(output), *(node for node in graph.nodes if node.op == "placeholder")]
    roots += [n for n in graph.nodes if "block" in n.meta and any(is_object(i) for i in n.all_input_nodes)]
    return ancestors(roots)


def is_object(node: fx.Node) -> bool:
    """Whether the node's value is a Python object of the caller's or one that glue made."""
    return "object" in node.meta or "template" in node.meta
