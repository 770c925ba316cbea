"""SplitModel: a model cut into stages, run in one process or handed to torch's pipeline schedules."""

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from dit_pipelining.capture.capturing import CaptureCache
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.hooks import refuse_cache
from dit_pipelining.capture.signature import CallInputs, bind, flatten_inputs
from dit_pipelining.costs.model_costs import weight_sizes
from dit_pipelining.costs.plan import CutPlan
from dit_pipelining.errors import ConfigError, InputError
from dit_pipelining.lowering.boundary import BoundaryValue, StagePlan, holds, plan_stages
from dit_pipelining.lowering.program import build_program
from dit_pipelining.lowering.stage import StageModule
from dit_pipelining.torch_internals import chunked, tree_map
from partitioners import Partition

COMPILE_MODES = ("blocks", "blocks-cudagraphs")


class SplitModel:
    """A model cut into pipeline stages.

    Made by `split_model`. Calling it runs all stages in this process and returns what the model returns. Inputs of
    another signature (other shapes, dtypes, structure) are captured when they first come; the stages keep their weights.

    Attributes:
        model: the unsplit model.
        partition: number of blocks per stage.
        stages: one StageModule per stage.
        graph: the forward as captured with the example inputs.
        boundaries: what crosses between stage i and i + 1, with the example inputs.
        cut: the costs and ranks that the partition was chosen for; None where it came from elsewhere.

    Args:
        prepare: called with the plans before the stages are made from the model's modules; loads weights.
        parameter_counts: of the model's modules as it was split first; what it did not have then is in it on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        captures: CaptureCache,
        graph: BlockGraph,
        partition: Partition,
        prepare: Callable[[list[StagePlan]], None] | None = None,
        cut: CutPlan | None = None,
        parameter_counts: Mapping[str, int] | None = None,
    ) -> None:
        self.model = model
        self.partition = partition
        self.cut = cut
        self.graph = graph
        self._captures = captures
        self._forward = captures.forward or model.forward
        self._running = threading.RLock()
        self._parameter_counts = parameter_counts or {
            name: elements for name, (elements, _) in weight_sizes(model).items()
        }
        plans = plan_stages(graph, partition, self._parameter_counts)
        if prepare is not None:
            prepare(plans)
        self.boundaries: list[tuple[BoundaryValue, ...]] = [plan.boundary for plan in plans[:-1]]
        self.stages = [
            StageModule(model, plan.index, partition.num_stages, plan.weights, self.resolve) for plan in plans
        ]
        for stage in self.stages:
            stage.add_program(build_program(graph, plans, stage.stage_index))

    @property
    def num_stages(self) -> int:
        return self.partition.num_stages

    def compile(self, mode: str = "blocks", stages: Sequence[int] | None = None) -> None:
        """Compile the blocks of some stages.

        Each kind of block is compiled once in a process, by torch.compile, however many blocks of the kind there are.

        Args:
            mode: `"blocks"`, or `"blocks-cudagraphs"`, which also replays a stage's work for one signature as a CUDA graph.
            stages: which. Default: all.

        Raises:
            ConfigError: there is no such mode or stage.
        """
        if mode not in COMPILE_MODES:
            raise ConfigError(f"mode={mode!r}: expected one of {', '.join(COMPILE_MODES)}.")
        for index in stages or ():
            self._check_stage(index)
        for index in range(self.num_stages) if stages is None else stages:
            self.stages[index].compile(mode)

    def resolve(self, kwargs: Mapping[str, Any]) -> tuple[BlockGraph, CallInputs]:
        """The graph for these inputs, captured and lowered to all stages if it is new.

        Raises:
            InputError: the forward does not take such inputs, or uses weights with them that the stages do not hold.
            CaptureError: the forward cannot be recorded with these inputs.
        """
        refuse_cache(self.model)
        kwargs = bind(self._forward, (), kwargs)
        inputs = flatten_inputs(kwargs)
        graph = self._captures.get(kwargs, inputs)
        if not self.stages[0].has_program(graph):
            partition = self._partition_of(graph)
            held = [stage.held_weights for stage in self.stages]
            plans = plan_stages(graph, partition, self._parameter_counts, held)
            _check_held(plans, held, self._parameter_counts)
            for stage in reversed(self.stages):  # the first stage last: it says whether all have theirs
                stage.add_program(build_program(graph, plans, stage.stage_index))
        return graph, inputs

    def _partition_of(self, graph: BlockGraph) -> Partition:
        """The partition of a graph that may run fewer or more block calls: a block stays where its weights are."""
        if [node.target for node in graph.blocks] == [node.target for node in self.graph.blocks]:
            return self.partition
        stage_of: dict[str, int] = {}
        for stage, (start, end) in enumerate(self.partition.ranges):
            for node in self.graph.blocks[start:end]:
                stage_of.setdefault(str(node.target), stage)
        counts = [0] * self.num_stages
        previous = 0
        for node in graph.blocks:
            previous = max(previous, stage_of.get(str(node.target), previous))
            counts[previous] += 1
        return Partition(tuple(counts), allow_empty=True)

    def cut_anew(self, partition: Partition, prepare: Callable[[list[StagePlan]], None] | None = None) -> "SplitModel":
        """The same model in other stages. This split must not be used afterwards.

        Args:
            partition: of the blocks of `graph`.
            prepare: as for a new split; moves weights.
        """
        cut = None if self.cut is None else replace(self.cut, partition=partition)
        return SplitModel(self.model, self._captures, self.graph, partition, prepare, cut, self._parameter_counts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in this process; takes and returns what the model's forward does, and runs the model's hooks."""
        with self._running:  # a capture exchanges the model's weights; no other thread may run it meanwhile
            if not (self.model._forward_pre_hooks or self.model._forward_hooks):
                return self._run(*args, **kwargs)
            attributes = self.model.__dict__
            own = attributes.get("forward")
            attributes["forward"] = self._run
            try:
                return self.model(*args, **kwargs)
            finally:
                del attributes["forward"]
                if own is not None:
                    attributes["forward"] = own

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        graph, inputs = self.resolve(bind(self._forward, args, kwargs))
        leaves = inputs.leaves
        tensors: Sequence[torch.Tensor] = ()
        for stage in self.stages:
            tensors = stage.run(graph, tensors, leaves)
        return graph.rebuild_output(tensors, inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitModel":
        """A copy of the model, cut alike; what was captured is shared."""
        model = deepcopy(self.model, memo)
        return SplitModel(model, self._captures.of_copy(model), self.graph, self.partition, cut=self.cut)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"a split {type(self.model).__name__} cannot be pickled: its stages run compiled parts of the forward. Pickle "
            "`split.model`, or save it with save_pretrained, and split it again; copy.deepcopy copies a split."
        )

    def kwargs_chunk_spec(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """How torch's schedules have to cut a batched call's inputs: `ScheduleGPipe(..., kwargs_chunk_spec=...)`.

        Tensors whose first dimension is the batch, that of the latents, are cut along it; all others (FLUX's position
        ids) go to every microbatch whole.
        """
        size = bind(self._forward, (), inputs)[self.graph.main_input].shape[0]

        def spec(value: Any) -> Any:
            return (
                chunked(value.ndim > 0 and value.shape[0] == size)
                if isinstance(value, torch.Tensor)
                else chunked(False)
            )

        return {name: tree_map(spec, value) for name, value in inputs.items()}

    def pipeline_stage(
        self, stage_index: int, device: torch.device | str, group: ProcessGroup | None = None
    ) -> PipelineStage:
        """A torch `PipelineStage` of one stage, for `ScheduleGPipe` and the other schedules.

        The example inputs given to `split_model` must be those of one microbatch. Metadata of inputs and outputs is known
        from the capture, so no extra forward runs at the first step. Every rank passes the model's inputs to
        `schedule.step(**kwargs)`; the last stage returns the flat tensors of the model's output.

        Args:
            stage_index: 0 to num_stages - 1.
            device: where the stage runs; its weights must be there.
            group: process group of the pipeline; default: all ranks.

        Raises:
            ConfigError: there is no such stage.
        """
        self._check_stage(stage_index)
        stage = self.stages[stage_index]
        received, sent = stage.wire_metadata(self.graph)
        return PipelineStage(
            stage,
            stage_index,
            self.num_stages,
            torch.device(device),
            input_args=received,
            output_args=sent,
            group=group,
        )

    def _check_stage(self, index: object) -> None:
        if not isinstance(index, int) or not 0 <= index < self.num_stages:
            raise ConfigError(f"there is no stage {index!r}; this split has stages 0 to {self.num_stages - 1}.")


def unused_tensors(model: nn.Module, graph: BlockGraph, blocks: Sequence[str]) -> frozenset[str]:
    """Names of the parameters and buffers outside of blocks that the captured forward does not use."""
    used = frozenset().union(*graph.weights_of.values())
    within = tuple(f"{name}." for name in (*used, *blocks))
    return frozenset(name for name in model.state_dict() if name not in used and not name.startswith(within))


def _check_held(plans: Sequence[StagePlan], held: Sequence[frozenset[str]], known: Container[str]) -> None:
    """Check that stages have the weights they need. What came to the model after the split is in it on every rank."""
    for plan, weights in zip(plans, held, strict=True):
        missing = [name for name in plan.weights if name in known and not holds(weights, name)]
        if missing:
            raise InputError(
                f"with these inputs stage {plan.index} needs {', '.join(sorted(missing))}, which it does not hold, since "
                "the example inputs did not use it there. Split the model with example inputs that run all that later "
                "calls run."
            )
