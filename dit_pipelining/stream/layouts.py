"""Layouts: which tensors follow a header, by the direction that it comes from."""

from dataclasses import dataclass

import torch

from dit_pipelining.comm.message_link import Layout
from dit_pipelining.stream.head import returned_rows
from dit_pipelining.stream.micro_step import Kind, decode
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.stage import StreamStage


@dataclass(frozen=True)
class Layouts:
    """The layouts of all messages that a rank can get.

    Attributes:
        stage: of this rank.
        noise: shaped and typed as latents are.
    """

    stage: StreamStage
    noise: NoiseSource

    def hop(self, header: torch.Tensor) -> list[Layout]:
        """From the stage before."""
        known = decode(header)
        if known.micro_step is not None:
            return self.stage.received(len(known.micro_step.rows))
        prompt = self.stage.prompts.example
        return [(tuple(prompt.shape), prompt.dtype)] if known.kind is Kind.PROMPT else []

    def returned(self, header: torch.Tensor) -> list[Layout]:
        """From the last stage to the first: the latents of rows that go on."""
        step = decode(header).micro_step
        count = len(returned_rows(step, self.stage.spec)) if step is not None else 0
        return [self._latents(count, self.noise.dtype)] if count else []

    def rows(self, header: torch.Tensor) -> list[Layout]:
        """From the first stage to the twin's: the latents of all rows."""
        step = decode(header).micro_step
        return [self._latents(len(step.rows), self.noise.dtype)] if step is not None else []

    def flow(self, header: torch.Tensor) -> list[Layout]:
        """From the twin's last stage: what it predicts for all rows."""
        step = decode(header).micro_step
        return [self._latents(len(step.rows), self.stage.dtype)] if step is not None else []

    def _latents(self, count: int, dtype: torch.dtype) -> Layout:
        return (count, *self.noise.shape[1:]), dtype
