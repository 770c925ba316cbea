"""Runs streams through the stages of a pipeline that are all in this process."""

import time
from collections.abc import Iterator, Sequence

import torch

from dit_pipelining.stream.head import Levels, Source, StreamHead
from dit_pipelining.stream.levels import change_levels
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.stage import StreamStage
from dit_pipelining.stream.tail import FinishedChunk, StreamTail

IDLE_SECONDS = 0.001
"""How long the first stage sleeps while its sources have nothing."""


def run_in_one_process(
    stages: Sequence[StreamStage], sources: Sequence[Source], noise: NoiseSource, levels: Levels | None = None
) -> Iterator[FinishedChunk]:
    """Run streams through stages that are all in this process, one after the other.

    Args:
        stages: of the pipeline, in order.
        sources: what each stream is made of.
        noise: the noise of chunks.
        levels: changes the noise levels while the streams run; None: they stay.

    Yields:
        finished chunks, as soon as they are: those of a stream in order.
    """
    spec = stages[0].spec
    head, tail = StreamHead(spec, len(stages), noise, sources, levels), StreamTail(spec, noise)
    while not head.finished:
        stages[0].wait_for_room()
        tick = head.next_tick(sum(stage.load() for stage in stages) if levels is not None else 0.0)
        if tick.levels:
            tail.spec = change_levels(stages, tick.levels)
            continue
        if tick.step is None:
            time.sleep(IDLE_SECONDS)
            continue
        for change in tick.prompts:
            stages[0].prompts.change(*change)
        tensors: list[torch.Tensor] = []
        for stage in stages:
            latents = head.latents(tick.step, tick.fresh) if stage is stages[0] else None
            tensors = stage.execute_micro_step(tick.step, tensors, latents)
        finished, going_on = tail.finish(tick.step, torch.cat(tensors), tick.fresh)
        if going_on is not None:
            head.take_back(tick.step, going_on)
        yield from finished
