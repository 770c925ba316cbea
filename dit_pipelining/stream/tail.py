"""StreamTail: what the last stage adds: clean latents from the flow, noise for the next level, finished chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dit_pipelining.stream.head import first_latents
from dit_pipelining.stream.micro_step import ChunkFacts, MicroStep
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.spec import StreamSpec


@dataclass(frozen=True)
class FinishedChunk:
    """A chunk that has passed all levels.

    Attributes:
        stream: which video.
        index: number of the chunk in its stream.
        latents: clean, (1, channels, frames, height, width).
        facts: what its source said of it.
    """

    stream: int
    index: int
    latents: torch.Tensor
    facts: ChunkFacts


class StreamTail:
    """Turns predictions into clean latents, and those into the next level's input.

    The latents that a row came with stay here: those of first passes are made anew from the same noise, so only what a
    source gave has to come from the first stage.

    Args:
        spec: of the streams.
        noise: as the head has it.
        guidance_scale: where a twin runs the rows without the prompt; else the spec's counts.
    """

    def __init__(self, spec: StreamSpec, noise: NoiseSource, guidance_scale: float | None = None) -> None:
        self.spec = spec
        self.guidance_scale = spec.guidance_scale if guidance_scale is None else guidance_scale
        self.noise = noise
        self._latents: dict[tuple[int, int], torch.Tensor] = {}

    def finish(
        self,
        step: MicroStep,
        flow: torch.Tensor,
        fresh: Sequence[tuple[int, torch.Tensor]],
        without: torch.Tensor | None = None,
    ) -> tuple[list[FinishedChunk], torch.Tensor | None]:
        """The last part of a tick.

        Args:
            step: the rows.
            flow: what the model predicts for them, (rows, channels, frames, height, width).
            fresh: what sources gave for first passes in this step, by stream.
            without: what the twin predicts for the same rows without the prompt.

        Returns:
            finished chunks, and the latents of the rows that go on, in their order; None if there are none.
        """
        given = dict(fresh)
        if without is not None:
            flow = torch.cat([flow, without])
        conditional = [number for number, row in enumerate(step.rows) if row.branch == 0]
        finished: list[FinishedChunk] = []
        going_on: list[torch.Tensor] = []
        for number in conditional:
            row, facts = step.rows[number], step.facts[number]
            if row.level == self.spec.num_levels:
                continue  # the pass over a finished chunk leaves keys and values only
            key = (row.stream, row.chunk)
            latents = self._latents.pop(key, None)
            if latents is None:  # a first pass
                latents = first_latents(row, facts, given.get(row.stream), self.noise)
            velocity = self._guided(flow, number, len(conditional)).to(latents.dtype)
            clean = latents - self.spec.sigma(row.level, facts.noise_scale) * velocity
            if row.level == self.spec.num_levels - 1:
                finished.append(FinishedChunk(row.stream, row.chunk, clean, facts))
                if self.spec.passes > self.spec.num_levels:
                    going_on.append(clean)
                continue
            sigma = self.spec.sigma(row.level + 1, facts.noise_scale)
            renoised = (1 - sigma) * clean + sigma * self.noise(row.stream, row.chunk, row.level + 1)
            self._latents[key] = renoised
            going_on.append(renoised)
        return finished, torch.cat(going_on) if going_on else None

    def _guided(self, flow: torch.Tensor, number: int, count: int) -> torch.Tensor:
        """The flow of a row, with guidance that of both branches: those without the prompt follow in the same order."""
        own = flow[number : number + 1]
        if len(flow) == count:
            return own
        without = flow[count + number : count + number + 1]
        return without + self.guidance_scale * (own - without)
