"""Capture a model's forward, and keep what was captured."""

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx, nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.capture.branch_hooks import asked_hooks, hooked
from dit_pipelining.capture.casting import cast_for_calls
from dit_pipelining.capture.chain import main_chain
from dit_pipelining.capture.code import compile_nodes
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.hooks import refuse_hooks
from dit_pipelining.capture.kept import KeptFunction
from dit_pipelining.capture.module_hooks import refuse_global_hooks, refuse_hooked
from dit_pipelining.capture.nodes import ancestors, is_object, nodes_in
from dit_pipelining.capture.record import Record
from dit_pipelining.capture.signature import CallInputs, first_argument, flatten_inputs
from dit_pipelining.capture.state import GlueState
from dit_pipelining.capture.step_caches import step_hooks, without_step_hooks
from dit_pipelining.capture.trace import trace
from dit_pipelining.capture.values import Questions
from dit_pipelining.errors import BlocksNotFoundError, ConfigError


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
        hooked=record.hooked,
        handing=frozenset(record.handing),
        draws=record.draws,
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
    """Graphs of one model, one per signature, state of its glue and set of answers about values.

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
    def state(self) -> GlueState:
        return GlueState(self.model, find_blocks(self.model, self.blocks))

    def get(self, kwargs: Mapping[str, Any], inputs: CallInputs | None = None) -> BlockGraph:
        refuse_global_hooks()
        inputs = inputs or flatten_inputs(kwargs)
        with self._lock:
            key = (inputs.signature, self.model.training, self.state.now(), asked_hooks(self.model))
            known = self.graphs.setdefault(key, [])
            graph = next((own for own in known if own.matches(self.model, inputs)), None)
            if graph is None:
                if self.before_capture is not None:
                    self.before_capture()
                graph = capture(self.model, kwargs, self.blocks, self.forward, self.count_work)
                known.append(graph)
            refuse_hooked(self.model, graph.handing)
            return graph

    def of_copy(self, model: nn.Module) -> "CaptureCache":
        """The same graphs for a copy of the model."""
        graphs = {key: list(known) for key, known in self.graphs.items()}
        return CaptureCache(model, self.blocks, model.forward, self.count_work, self.before_capture, graphs)


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
    roots = [*nodes_in(output), *(node for node in graph.nodes if node.op == "placeholder")]
    roots += [n for n in graph.nodes if "block" in n.meta and any(is_object(i) for i in n.all_input_nodes)]
    return ancestors(roots)
