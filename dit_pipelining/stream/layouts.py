"""Layouts: which tensors follow a header, by the direction that it comes from."""

import math
from dataclasses import dataclass

import torch

from dit_pipelining.comm.messages import ShapeAndDtype
from dit_pipelining.comm.peer_channels import slot_bytes
from dit_pipelining.stream.head import given_streams
from dit_pipelining.stream.micro_step import Kind, decode, following
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

    def hop(self, header: torch.Tensor) -> list[ShapeAndDtype]:
        """From the stage before."""
        known = decode(header)
        if known.micro_step is not None:
            return self.stage.received(len(known.micro_step.rows))
        prompt = self.stage.prompts.example
        return [(tuple(prompt.shape), prompt.dtype)] if known.kind is Kind.PROMPT else []

    def returned(self, header: torch.Tensor) -> list[ShapeAndDtype]:
        """From the last stage to the first: the latents of rows that go on."""
        count = following(header)
        return [self._latents(count, self.noise.dtype)] if count else []

    def fresh(self, header: torch.Tensor) -> list[ShapeAndDtype]:
        """From the first stage to the last: what sources gave for first passes."""
        step = decode(header).micro_step
        return [self._latents(len(given_streams(step)), self.noise.dtype)] if step is not None else []

    def rows(self, header: torch.Tensor) -> list[ShapeAndDtype]:
        """From the first stage to the twin's: the latents of all rows."""
        step = decode(header).micro_step
        return [self._latents(len(step.rows), self.noise.dtype)] if step is not None else []

    def flow(self, header: torch.Tensor) -> list[ShapeAndDtype]:
        """From the twin's last stage: what it predicts for all rows."""
        step = decode(header).micro_step
        return [self._latents(len(step.rows), self.stage.dtype)] if step is not None else []

    def sizes(self) -> dict[str, int]:
        """Bytes of the largest message of each kind of direction."""
        spec = self.stage.spec
        prompt = self.stage.prompts.example.nbytes
        rows, flow = (
            slot_bytes([_bytes(self._latents(spec.max_rows, dtype))]) for dtype in (self.noise.dtype, self.stage.dtype)
        )
        hop = max(self.stage.largest_hop(), slot_bytes([prompt]))
        return {"hop": hop, "back": rows, "fresh": rows, "twin": rows, "flow": flow}

    def _latents(self, count: int, dtype: torch.dtype) -> ShapeAndDtype:
        return (count, *self.noise.shape[1:]), dtype


def _bytes(layout: ShapeAndDtype) -> int:
    shape, dtype = layout
    return math.prod(shape) * dtype.itemsize
