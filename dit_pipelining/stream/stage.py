"""StreamStage: one stage's blocks, their caches, and the micro-steps that run through them."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.signature import MADE
from dit_pipelining.comm.messages import ShapeAndDtype
from dit_pipelining.comm.peer_channels import slot_bytes
from dit_pipelining.errors import InputError
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.stream.attention import make_causal, make_plain
from dit_pipelining.stream.kv_cache import DistributedKVCache
from dit_pipelining.stream.micro_step import MicroStep
from dit_pipelining.stream.passes import Passes
from dit_pipelining.stream.prompts import Prompts
from dit_pipelining.stream.rotary import Table
from dit_pipelining.stream.spec import TRAIN_TIMESTEPS, StreamSpec

QUEUED_STEPS = 2
"""Micro-steps that the host gives to the GPU before the first of them is done: one runs, and the next one is ready."""

TIMED_STEPS = 128
"""Micro-steps whose times a stage remembers."""


class StreamStage:
    """Runs the micro-steps of one stage.

    Args:
        split: the model in stages.
        index: of this stage.
        spec: of the streams, with the most levels that they will have.
        shape: of the latents of one chunk, (1, channels, frames, height, width).
        prompts: what each stream shows, on this rank.
        caches: of this stage's blocks.
        device: of this stage.
        batched: all rows of a micro-step in one batch. False: one after the other, for bits that do not depend on what else
            is in flight, since kernels round batches differently.

    Attributes:
        times: of micro-steps: rows, and seconds or a pair of CUDA events.
    """

    def __init__(
        self,
        split: SplitModel,
        index: int,
        spec: StreamSpec,
        shape: Sequence[int],
        prompts: Prompts,
        caches: DistributedKVCache,
        device: torch.device,
        batched: bool = True,
    ) -> None:
        self.spec = spec
        self.shape = tuple(shape)
        self.prompts = prompts
        self.caches = caches
        self.device = device
        self.batched = batched
        self.dtype: torch.dtype = cast(Any, split.model).dtype
        self.times: deque[tuple[int, Any]] = deque(maxlen=TIMED_STEPS)
        self._blocks: list[nn.Module] = []
        self._times: tuple[tuple[float, ...], torch.Tensor] | None = None
        self._given = 0.0
        self._most_rows = spec.max_rows
        self.rebuild(split, index)

    def rebuild(self, split: SplitModel, index: int) -> None:
        """Take another share of the blocks; their caches are there already."""
        self.split = split
        self.module = split.stages[index]
        self.times.clear()
        names = self.block_names(index)
        make_plain(self._blocks)
        self._blocks = [split.model.get_submodule(name) for name in names]
        self._graphs = {count: self._resolve(count) for count in self._batch_sizes()}
        self._own_caches = [self.caches.of(name) for name in names]
        self._passes = Passes(self.spec, self._rotary())
        make_causal(self._blocks, self._own_caches, self._passes, self.module.compiled)
        self.module.record_forms(lambda: self._passes.form)
        if index and any("hidden_states" in program.inputs for program in self.module.programs.values()):
            raise InputError("a stage behind the first one reads the latents, which it does not get.")

    def change_spec(self, spec: StreamSpec) -> None:
        """Go on with other levels; the caches have been changed, and nothing is in flight."""
        self.spec = spec
        self.rebuild(self.split, self.module.stage_index)

    def block_names(self, index: int) -> list[str]:
        """The blocks of a stage."""
        start, end = self.split.partition.ranges[index]
        return [str(node.target) for node in self.split.graph.blocks[start:end]]

    def received(self, count: int) -> list[ShapeAndDtype]:
        """Shapes and dtypes of the tensors that come from the stage before, for `count` rows."""
        parts = [count] if self.batched else [1] * count
        return [(v.wire_shape, v.dtype) for part in parts for v in self.module.received(self._graphs[part])]

    def largest_hop(self) -> int:
        """Bytes of the largest message between any two stages, each tensor aligned."""
        largest, parts = max(self._graphs), 1 if self.batched else self._most_rows
        messages = self.module.messages(self._graphs[largest])
        return max((slot_bytes(own * parts) for own in map(list, messages)), default=0)

    def execute_micro_step(
        self, step: MicroStep, received: Sequence[torch.Tensor], latents: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Run the rows of one tick.

        Args:
            step: the rows.
            received: what the stage before sent; empty for the first one.
            latents: of the rows, (rows, channels, frames, height, width); for the first stage.

        Returns:
            what the next stage receives; from the last stage the flow of the rows, shaped like `latents`.
        """
        started = self._now()
        parts = [step]
        if not self.batched:
            pairs = zip(step.rows, step.facts, strict=True)
            parts = [MicroStep(step.tick, (row,), (facts,)) for row, facts in pairs]
        per_part = len(received) // len(parts)
        outputs: list[torch.Tensor] = []
        for number, part in enumerate(parts):
            own = received[number * per_part : (number + 1) * per_part]
            rows = None if latents is None else latents if self.batched else latents[number : number + 1]
            outputs += self._run(part, own, rows)
        self.times.append((len(step.rows), (started, self._now())))
        self._given = time.monotonic()
        return outputs

    def wait_for_room(self) -> None:
        """On CUDA, wait until one micro-step at most is unfinished: what a live source gives now shall not lie about."""
        if self.device.type == "cuda" and len(self.times) >= QUEUED_STEPS:
            self.times[-QUEUED_STEPS][1][1].synchronize()

    def seconds_unfinished(self) -> float:
        """For how long the GPU has not been done with the last micro-step; 0 where it is."""
        if self.device.type != "cuda" or not self.times or self.times[-1][1][1].query():
            return 0.0
        return time.monotonic() - self._given

    def seconds(self) -> list[tuple[int, float]]:
        """Rows and seconds of the micro-steps that are remembered; on CUDA, waits for the device."""
        if self.device.type != "cuda":
            return [(count, end - start) for count, (start, end) in self.times]
        torch.cuda.synchronize(self.device)
        return [(count, start.elapsed_time(end) / 1e3) for count, (start, end) in self.times]

    def load(self) -> float:
        """The share of the last micro-steps' time in which this stage worked; waits for nothing."""
        done = [(began, ended) for _, (began, ended) in self.times if self.device.type != "cuda" or ended.query()]
        if len(done) < 2:
            return 0.0
        if self.device.type != "cuda":
            worked, passed = sum(ended - began for began, ended in done), done[-1][1] - done[0][0]
        else:
            worked = sum(began.elapsed_time(ended) for began, ended in done)
            passed = done[0][0].elapsed_time(done[-1][1])
        return float(worked / max(passed, 1e-9))

    def _run(
        self, step: MicroStep, received: Sequence[torch.Tensor], latents: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        text = self.prompts.of(step.rows)
        self._passes.begin(step, self._own_caches, text)
        succeeded = False
        try:
            graph = self._graphs[len(step.rows)]
            outputs = self.module.run(graph, received, self._leaves(step, text, latents))
            succeeded = True
            return outputs
        finally:
            self._passes.end(succeeded)

    def _leaves(self, step: MicroStep, text: torch.Tensor, latents: torch.Tensor | None) -> Mapping[str, Any]:
        times = [
            self.spec.sigma(row.level, facts.noise_scale) * TRAIN_TIMESTEPS
            for row, facts in zip(step.rows, step.facts, strict=True)
        ]
        leaves: dict[str, Any] = {
            "timestep": self._timestep(tuple(times)),
            "encoder_hidden_states": text.to(self.dtype),
            MADE: {},
        }
        if latents is not None:
            leaves["hidden_states"] = latents.to(self.dtype)
        return leaves

    def _timestep(self, times: tuple[float, ...]) -> torch.Tensor:
        """The same tensor as long as the times are the same."""
        if self._times is None or self._times[0] != times:
            self._times = times, torch.tensor(times, dtype=torch.float32).to(self.device, non_blocking=True)
        return self._times[1]

    def _rotary(self) -> Table:
        """The model's own table for the first chunk."""
        rope: Any = self.split.model.get_submodule("rope")
        table: Table = rope(torch.zeros(self.shape, device=self.device))
        return table

    def _batch_sizes(self) -> range:
        return range(1, self._most_rows + 1) if self.batched else range(1, 2)

    def _resolve(self, count: int) -> BlockGraph:
        """The captured forward for this many rows."""
        text = self.prompts.example
        inputs = {
            "hidden_states": torch.zeros((count, *self.shape[1:]), dtype=self.dtype, device=self.device),
            "timestep": self._timestep((0.0,) * count),
            "encoder_hidden_states": text.new_zeros((count, *text.shape[1:])).to(self.dtype),
            "return_dict": False,
        }
        return self.split.resolve(inputs)[0]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))
