"""One transformer of a pipeline, spread over the ranks: its calls run stage by stage and return on every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.capture.capturing import CaptureCache
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.hooks import refuse_hooks
from dit_pipelining.capture.module_hooks import refuse_compiled, refuse_global_hooks
from dit_pipelining.capture.signature import CallInputs, bind, first_argument, flatten_inputs
from dit_pipelining.config import ParallelConfig
from dit_pipelining.config_names import sources_named
from dit_pipelining.costs.machine import machine_of
from dit_pipelining.costs.plan import CutPlan, plan_cut
from dit_pipelining.costs.together import NO_OTHERS, Others
from dit_pipelining.errors import CaptureError
from dit_pipelining.lowering.boundary import StagePlan, holds
from dit_pipelining.lowering.placed_blocks import PlacedBlocks
from dit_pipelining.lowering.split import SplitModel, unused_tensors
from dit_pipelining.lowering.stage import StageModule
from dit_pipelining.runtime.idle import IdleReplicas
from dit_pipelining.runtime.microbatches import Cutter, batch_size, gives_batch, is_share, merge
from dit_pipelining.runtime.pending import resolved
from dit_pipelining.runtime.rebalance import Rebalancer
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.runtime.schedules import GPipe
from dit_pipelining.runtime.step_states import StepCall, step_call
from dit_pipelining.runtime.withheld import refuse_withheld
from dit_pipelining.sharding.hsdp import ShardedBlocks
from dit_pipelining.sharding.token_hooks import whole_tokens
from partitioners import Component, Partition, balanced

FillStage = Callable[[StagePlan, Mapping[str, Callable[[], object]]], None]
"""Gives the model the weights of one stage, and takes away all others. The mapping has what to do with a module of the stage
once its weights are there, before those of others are."""


class TransformerExecutor:
    """Runs the calls of one transformer.

    The split waits for the first call, because where to cut depends on the shapes that come; then this rank's weights are
    loaded. What can be wrong without knowing the shapes is checked at once.

    Args:
        name: of the component in its pipeline, for messages and for `ParallelConfig.partition`.
        model: the transformer.
        whole: it or its copy, of which no rank has a part: what decides where to cut.
        config: degrees, partitioner and schedule.
        rolling: the pipeline's runtime.
        fill_stage: called once with this rank's stage plan.
        components: what else the ranks hold and run, bound to their stages.
        others: the pipeline's other transformers.
        sharded: keeps the stage's blocks sharded over the ranks that hold them too.

    Raises:
        BlocksNotFoundError, PartitionError: the transformer cannot be cut as asked.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        whole: nn.Module,
        config: ParallelConfig,
        rolling: Rolling,
        fill_stage: FillStage,
        components: Sequence[Component] = (),
        others: Others = NO_OTHERS,
        sharded: ShardedBlocks | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.config = config
        self.rolling = rolling
        self.device = rolling.device
        self.split: SplitModel | None = None
        self.counts = check_counts(config, name, model)
        self.machine = machine_of(config)
        self._captures, self._whole = self._capturing(model), self._capturing(whole)
        self._fill_stage = fill_stage
        self._components = components
        self._others = others
        self._sharded = sharded
        self._gpipe: GPipe | None = None
        self.rebalancer: Rebalancer | None = None
        latents = first_argument(model.forward)
        self._over_replicas = Cutter(latents, config.cfg_parallel_size, self._fits)
        self._along_stages = Cutter(latents, config.microbatches, self._fits)
        self._idle = IdleReplicas(name, 1 if config.use_hsdp else config.cfg_parallel_size)  # replicas hold weights too
        self._placed: PlacedBlocks | None = None
        rolling.between_calls.append(self._refuse_changes)
        rolling.alike[f"what is changed in {name!r}"] = self._captures.state.changed_by_hand

    def _capturing(self, model: nn.Module) -> CaptureCache:
        return CaptureCache(
            model, self.config.blocks, model.forward, count_work=True, before_capture=self.rolling.drain
        )

    @property
    def awaits_weights(self) -> bool:
        """Whether the checkpoint is yet to be read."""
        return self.split is None and any(tensor.device.type == "meta" for tensor in self.model.parameters())

    @property
    def holds_parts(self) -> bool:
        """Whether ranks hold parts of the weights of blocks."""
        return self.config.tensor_parallel_size > 1 or self.config.use_hsdp

    def __call__(self, kwargs: Mapping[str, Any]) -> Any:
        """Run one call of the forward; returns on every rank what the unsplit transformer returns."""
        kwargs = resolved(dict(kwargs))
        refuse_withheld(f"the transformer {self.name!r}", kwargs)
        parts = [part for own in self._over_replicas.cut(kwargs) for part in self._along_stages.cut(own)]
        self._idle.see(self.rolling.turns, len(parts))
        split = self.split_for(parts[0])
        calls = [split.resolve(part) for part in parts]
        self._refuse_random(calls[0][0])
        return merge(
            self._run_gpipe(calls)
            if self._gpipe is not None
            else [self._submit(*call, step_call(self.model, part)) for part, call in enumerate(calls)]
        )

    def split_for(self, kwargs: Mapping[str, Any]) -> SplitModel:
        """The model in stages, cut for a call with these arguments if it has not been cut yet."""
        if self.split is not None:
            return self.split
        with sources_named(self.config.told):
            return self._split(kwargs)

    def _fits(self, whole: Mapping[str, Any], part: Mapping[str, Any], size: int) -> bool:
        """Whether the forward takes these inputs of a smaller batch, and does its share of the whole with them."""
        try:
            graph, reference = self._captures.get(part), self._captures.get(whole)
        except Exception:  # whatever it is: if the whole batch fails too, that error is raised
            return False
        outputs = [torch.empty(node.meta["shape"], device="meta") for node in graph.output_nodes]
        output = graph.rebuild_output(outputs, flatten_inputs(part))
        count = batch_size(whole, graph.main_input) // size
        return gives_batch(output, size) and is_share(reference, graph, count)

    def _submit(self, graph: BlockGraph, inputs: CallInputs, steps: StepCall | None) -> Any:
        stage = self._stage()
        tensors, arrival = self.rolling.submit(stage, graph, inputs, steps)
        if inputs.objects or graph.output_objects:
            arrival.wait()  # a cache among the inputs or the outputs must be filled when the call returns
            self.rolling.drain()
            graph.complete_objects(inputs)
        return graph.rebuild_output(tensors, inputs)

    def _run_gpipe(self, calls: Sequence[tuple[BlockGraph, CallInputs]]) -> list[Any]:
        assert self._gpipe is not None
        guard = self.rolling.guard
        outputs = []
        for _, same_graph in groupby(calls, key=lambda call: id(call[0])):
            group = list(same_graph)
            graph = group[0][0]
            guard.count_step()
            try:
                tensors = self._gpipe.run(graph, [inputs.leaves for _, inputs in group])
            except Exception as error:  # the other ranks are in the same schedule and wait for this one
                raise guard.fail(error) from None
            for _, inputs in group:
                graph.complete_objects(inputs)
            outputs += [graph.rebuild_output(own, inputs) for own, (_, inputs) in zip(tensors, group, strict=True)]
        return outputs

    def _refuse_changes(self) -> None:
        """Refuse what was done to the model since the call before, if its stages cannot follow it."""
        refuse_global_hooks()
        refuse_hooks(self.model)
        if self.config.compile is not None:
            refuse_compiled(self.model, self.name)
        if self._placed is not None:
            self._placed.check(find_blocks(self.model, self.config.blocks), self._stage_of)

    def _refuse_random(self, graph: BlockGraph) -> None:
        if graph.draws:
            raise CaptureError(
                f"blocks of the transformer {self.name!r} draw random numbers ({graph.draws}). Ranks would draw others than "
                "one process does. If it is dropout, call eval() on the transformer."
            )

    def _stage_of(self, block: str) -> int | None:
        assert self.split is not None
        return next((s.stage_index for s in self.split.stages if holds(s.held_weights, block)), None)

    def _stage(self) -> StageModule:
        assert self.split is not None
        return self.split.stages[self.rolling.mesh.stage]

    def _split(self, kwargs: Mapping[str, Any]) -> SplitModel:
        kwargs = bind(self.model.forward, (), kwargs)
        graph = self._captures.get(kwargs)
        self._refuse_random(graph)
        cut = self._plan(graph, kwargs)
        stage = self.rolling.mesh.stage
        unused = unused_tensors(self.model, graph, find_blocks(self.model, self.config.blocks))

        def fill(plans: list[StagePlan]) -> None:
            # Pipelines can ask for what the forward does not use (a prior's mean and deviation): every rank has it.
            plan = replace(plans[stage], weights=plans[stage].weights | unused)
            self._fill_stage(plan, self._sharding_of(graph, plan))

        self.split = SplitModel(self.model, self._captures, graph, cut.partition, fill, cut)
        self._placed = PlacedBlocks(self.model, find_blocks(self.model, self.config.blocks))
        if self.config.rebalance and self.split.num_stages > 1:
            partitioner = self.config.partitioner if callable(self.config.partitioner) else balanced
            self.rebalancer = Rebalancer(self.name, self.split, self.rolling, partitioner)
            self.rolling.between_calls.append(self._rebalance)
        if self._sharded is not None:
            self._sharded.finish()
            self._stage().sharded = self._sharded
        self._prepare_stage()
        return self.split

    def _plan(self, graph: BlockGraph, kwargs: Mapping[str, Any]) -> CutPlan:
        """Where to cut, by what the whole call costs: all ranks find the same, whatever part of it is theirs."""
        layout = self.rolling.mesh.layout
        if layout.inside > 1:
            with whole_tokens():
                graph = self._whole.get(kwargs)
        return plan_cut(
            graph,
            self._whole.model,
            self.machine,
            self.config.partitioner,
            self.counts,
            self._components,
            layout=layout,
            shards=self._sharded.shards if self._sharded is not None else 1,
            others=self._others,
            blocks=self.config.blocks,
        )

    def _sharding_of(self, graph: BlockGraph, plan: StagePlan) -> dict[str, Callable[[], object]]:
        """How each block of the main chain is sharded; those of which glue uses a part stay whole."""
        if self._sharded is None:
            return {}
        mine = set(plan.computed)
        names = dict.fromkeys(str(node.target) for node in graph.blocks if node in mine)
        return {
            name: partial(self._sharded.shard, name, self.model.get_submodule(name))
            for name in names
            if not any(weight.startswith(f"{name}.") for weight in plan.weights)
        }

    def _rebalance(self) -> None:
        assert self.rebalancer is not None
        if (partition := self.rebalancer.better_partition()) is not None:
            self.repartition(partition)

    def repartition(self, partition: Partition) -> SplitModel:
        """Move blocks between the ranks, which all call this while nothing is in flight."""
        assert self.rebalancer is not None
        self.split = self.rebalancer.move(partition)
        self._prepare_stage()
        return self.split

    def _prepare_stage(self) -> None:
        """What a new split needs before its first call."""
        assert self.split is not None
        if self.config.compile:
            self.split.compile(self.config.compile, [self.rolling.mesh.stage])
        gpipe = self.config.schedule == "gpipe"
        self._gpipe = GPipe(self._stage(), self.device, self.rolling.line_group) if gpipe else None


def check_counts(config: ParallelConfig, name: str, model: nn.Module) -> str | Sequence[int] | None:
    """Check what can be said about a partition before the shapes are known; returns the configuration's own counts.

    Raises:
        BlocksNotFoundError, PartitionError: the transformer cannot be cut as asked.
    """
    config.check_counts(name, len(find_blocks(model, config.blocks)))
    return config.counts_for(name)
