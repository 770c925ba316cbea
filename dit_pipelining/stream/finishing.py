"""Finishing: what the last rank adds to its stage: the tail, and the messages that it needs besides those of a stage."""

from collections.abc import Sequence

import torch

from dit_pipelining.stream.ends import Ends, until_the_end
from dit_pipelining.stream.head import given_streams
from dit_pipelining.stream.micro_step import MicroStep
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.tail import FinishedChunk, StreamTail


class Finishing:
    """Finishes the rows of each tick.

    Args:
        ends: of this rank.
        noise: as the head has it.
        guidance_scale: where a twin runs the rows without the prompt; else the spec's counts.
    """

    def __init__(self, ends: Ends, noise: NoiseSource, guidance_scale: float | None) -> None:
        self.tail = StreamTail(ends.stage.spec, noise, guidance_scale)
        links = ends.links
        self._flow = ends.receiver(links.flow) if links.flow is not None else None
        self._fresh = ends.receiver(links.fresh) if links.fresh is not None else None

    def finish(
        self,
        step: MicroStep,
        outputs: Sequence[torch.Tensor],
        fresh: Sequence[tuple[int, torch.Tensor]] | None = None,
    ) -> tuple[list[FinishedChunk], torch.Tensor | None]:
        """As `StreamTail.finish`.

        Args:
            step: the rows.
            outputs: of this rank's stage.
            fresh: what sources gave, by stream; None: it comes from the first rank.
        """
        flow = torch.cat(list(outputs))
        given = self._take_fresh(step) if fresh is None else fresh
        if self._flow is None:
            return self.tail.finish(step, flow, given)
        while True:
            with self._flow.next() as message:
                if message.tensors:  # else it only says that the twin is there
                    return self.tail.finish(step, flow, given, message.tensors[0].clone())

    def close(self) -> None:
        """Take the last messages."""
        for receiver in (self._flow, self._fresh):
            if receiver is not None:
                until_the_end(receiver)

    def _take_fresh(self, step: MicroStep) -> list[tuple[int, torch.Tensor]]:
        streams = given_streams(step)
        if not streams:
            return []
        assert self._fresh is not None
        with self._fresh.next() as message:
            latents = message.tensors[0].clone()
        return list(zip(streams, latents.split(1), strict=True))
