"""StageModule: one stage of a split model, an nn.Module whose state dict is a subset of the model's own."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dit_pipelining.capture.branch_hooks import hooked
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.nodes import value_bytes
from dit_pipelining.capture.signature import CallInputs
from dit_pipelining.capture.step_caches import keeps_steps
from dit_pipelining.errors import ConfigError
from dit_pipelining.lowering.boundary import BoundaryValue, holds, with_plain_strides
from dit_pipelining.lowering.clock import StageClock
from dit_pipelining.lowering.cuda_graph import GraphedFunction
from dit_pipelining.lowering.program import StageProgram
from dit_pipelining.sharding.hsdp import ShardedBlocks
from dit_pipelining.torch_internals import local_part

Resolve = Callable[[Mapping[str, Any]], tuple[BlockGraph, CallInputs]]


class StageModule(nn.Module):
    """The blocks of one stage and the glue parameters it uses, under the model's own names.

    The modules are those of the model it was made from, and the stage looks them up in the model when it runs, so that
    adapters, hooks, compiled blocks, attention backends and exchanged weights act as they do there. Programs of further
    signatures are added with `add_program` and share the weights.

    Args:
        model: the model the graph was captured from, with weights or without.
        index: of the stage.
        num_stages: of the pipeline.
        weights: names of the modules, parameters and buffers to hold.
        resolve: gives the graph for a call's keyword arguments, with its program added; used by `forward`.
    """

    def __init__(
        self, model: nn.Module, index: int, num_stages: int, weights: frozenset[str], resolve: Resolve
    ) -> None:
        super().__init__()
        self.resolve = resolve
        self.stage_index = index
        self.num_stages = num_stages
        self.held_weights = weights
        self.programs: dict[int, StageProgram] = {}
        self.compiled = False
        self.cuda_graphs = False
        self._form: Callable[[], Hashable | None] = tuple
        self.__dict__["_model"] = model  # not as a submodule: the stage holds its own part only
        for name in sorted(weights, key=lambda name: (name.count("."), name)):
            _hold(self, model, name)
        self.training = model.training
        self.clock: StageClock | None = None
        self.sharded: ShardedBlocks | None = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "StageModule":
        """Moves and casts act on the parameters in place, but make new buffers: give those to the model too."""
        super()._apply(fn, recurse)
        for name in self.held_weights:
            path, _, key = name.rpartition(".")
            owner = self.model.get_submodule(path)
            if key in owner._buffers:
                owner._buffers[key] = self.get_submodule(path)._buffers[key]
        return self

    @property
    def model(self) -> nn.Module:
        """The model whose stage this is."""
        found: nn.Module = self.__dict__["_model"]
        return found

    def add_program(self, program: StageProgram) -> None:
        if self.cuda_graphs:
            weights = tuple(sorted(self.held_weights))
            program = replace(program, function=GraphedFunction(program.function, weights, lambda: self._form()))
        self.programs[id(program.graph)] = program

    def compile(self, mode: str) -> None:
        """Make the stage faster; see `ParallelConfig.compile`. Programs that are added later are treated alike.

        Args:
            mode: `"blocks"` or `"blocks-cudagraphs"`.
        """
        for name in dict.fromkeys(str(node.target) for own in self.programs.values() for node in own.blocks):
            self.model.get_submodule(name).compile()
        self.compiled = True
        if mode == "blocks-cudagraphs" and not self.cuda_graphs:
            self.cuda_graphs = True
            for program in list(self.programs.values()):
                self.add_program(program)

    def record_forms(self, form: Callable[[], Hashable | None]) -> None:
        """Let CUDA graphs depend on more than the layouts of tensors; those that were recorded are dropped.

        Args:
            form: asked at each call: what else a recording is made for; None: this call cannot be recorded or replayed.
        """
        self._form = form
        for program in self.programs.values():
            if isinstance(program.function, GraphedFunction):
                program.function.drop()

    def has_program(self, graph: BlockGraph) -> bool:
        return id(graph) in self.programs

    def forward(self, *received: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Run the stage as torch's schedules do.

        Args:
            received: what the stage before sent; nothing for the first stage.
            kwargs: the model's own inputs.

        Returns:
            the tensors for the next stage, or the flat output tensors of the model from the last stage.
        """
        if keeps_steps(self.model):
            raise ConfigError(
                f"{type(self.model).__name__} has a cache on, whose modules keep something from step to step. torch's "
                "schedules run microbatches through them as if each were a step. Call disable_cache()."
            )
        graph, inputs = self.resolve(kwargs)
        return tuple(map(with_plain_strides, self.run(graph, received, inputs.leaves)))

    def received(self, graph: BlockGraph) -> tuple[BoundaryValue, ...]:
        """What the stage before sends for this graph."""
        return self.programs[id(graph)].received

    def sent(self, graph: BlockGraph) -> tuple[BoundaryValue, ...]:
        """What goes to the next stage for this graph."""
        return self.programs[id(graph)].sent

    def messages(self, graph: BlockGraph) -> tuple[tuple[int, ...], ...]:
        """Bytes of the tensors that cross each boundary of the pipeline for this graph."""
        return self.programs[id(graph)].messages

    def kept_bytes(self, graph: BlockGraph) -> tuple[int, int]:
        """Bytes of what is computed once per denoising loop: for each call of a step, and for all calls together."""
        sizes = [0, 0]
        for group in self.programs[id(graph)].groups:
            sizes[not group.kept.inputs] += sum(map(value_bytes, group.values))
        return sizes[0], sizes[1]

    def wire_metadata(self, graph: BlockGraph) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Tensors on the meta device like those the stage receives and returns for this graph."""
        program = self.programs[id(graph)]
        received = tuple(torch.empty(v.wire_shape, dtype=v.dtype, device="meta") for v in program.received)
        if program.sent:
            return received, tuple(torch.empty(v.wire_shape, dtype=v.dtype, device="meta") for v in program.sent)
        outputs = (node.meta for node in graph.output_nodes)
        return received, tuple(
            with_plain_strides(torch.empty_strided(meta["shape"], meta["stride"], dtype=meta["dtype"], device="meta"))
            for meta in outputs
        )

    def run(
        self, graph: BlockGraph, received: Sequence[torch.Tensor], leaves: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Run the stage for one captured graph.

        Args:
            graph: a graph whose program was added.
            received: the tensors the stage before sent, in their order; empty for the first stage.
            leaves: tensors and objects of the call's inputs by path (`CallInputs.leaves`).

        Returns:
            the tensors for the next stage, or the output tensors (`BlockGraph.output_nodes`) from the last stage.
        """
        if self.clock is None:
            return self._run(graph, received, leaves)
        with self.clock.measured(graph):
            return self._run(graph, received, leaves)

    def _run(
        self, graph: BlockGraph, received: Sequence[torch.Tensor], leaves: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        program = self.programs[id(graph)]
        if self.sharded is not None:
            self.sharded.start_pass([str(node.target) for node in program.blocks])
        if graph.hooks:
            mine = [hook for hook in graph.hooks if holds(self.held_weights, hook.module)]
            with hooked(self.model, mine):
                return self._run_scaled(program, received, leaves)
        return self._run_scaled(program, received, leaves)

    def _run_scaled(
        self, program: StageProgram, received: Sequence[torch.Tensor], leaves: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        graph = program.graph
        if graph.lora_scale == 1.0:
            return program.run(self.model, received, leaves)
        from diffusers.utils.peft_utils import scale_lora_layers, unscale_lora_layers

        modules = list(self._modules_of_the_model())
        for module in modules:
            scale_lora_layers(module, graph.lora_scale)
        try:
            return program.run(self.model, received, leaves)
        finally:
            for module in modules:
                unscale_lora_layers(module, graph.lora_scale)

    def gather_only(self, graph: BlockGraph) -> None:
        """Gather sharded weights as `run` does, for ranks that run the stage for another call meanwhile."""
        if self.sharded is not None:
            self.sharded.gather_only([str(node.target) for node in self.programs[id(graph)].blocks])

    def _modules_of_the_model(self) -> Iterator[nn.Module]:
        """The modules the stage runs, as the model has them now: an adapter may have been put in their place."""
        for name in self.held_weights:
            path, _, key = name.rpartition(".")
            value = getattr(self.model.get_submodule(path), key)
            inside = any(name.startswith(f"{other}.") for other in self.held_weights)
            if isinstance(value, nn.Module) and not inside:
                yield value

    @property
    def parameter_bytes(self) -> int:
        """Of the weights on this rank."""
        return sum(local_part(tensor).nbytes for tensor in self.parameters())

    def extra_repr(self) -> str:
        return f"stage {self.stage_index + 1} of {self.num_stages}"


def _hold(stage: nn.Module, model: nn.Module, name: str) -> None:
    """Put the model's module, parameter or buffer of this name into the stage under the same name."""
    parent_name, _, key = name.rpartition(".")
    if _resolves(stage, name):
        return  # lies inside a module that is held as a whole
    owner = model.get_submodule(parent_name)
    parent = stage
    for part in parent_name.split(".") if parent_name else ():
        if part not in parent._modules:
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    value = getattr(owner, key)
    if isinstance(value, nn.Module):
        parent.add_module(key, value)
    elif key in owner._buffers:
        parent.register_buffer(key, value, persistent=key not in owner._non_persistent_buffers_set)
    elif key in owner._parameters:
        parent.register_parameter(key, value)


def _resolves(root: nn.Module, name: str) -> bool:
    value: Any = root
    for part in name.split("."):
        if part not in {**value._modules, **value._parameters, **value._buffers}:
            return False
        value = getattr(value, part)
    return True
