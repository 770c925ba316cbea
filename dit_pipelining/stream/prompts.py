"""Prompts: which text each chunk of each stream shows, on one rank."""

from collections.abc import Sequence

import torch

from dit_pipelining.errors import InputError
from dit_pipelining.stream.schedule import Row


class Prompts:
    """Embedded prompts, which may change from one chunk to the next.

    Args:
        prompts: of each stream, (1, tokens, channels).
        negative: what rows without the prompt get instead (guidance), (1, tokens, channels).
        in_flight: the most chunks of a stream that can be in flight; older prompts are forgotten.
    """

    def __init__(
        self, prompts: Sequence[torch.Tensor], negative: torch.Tensor | None = None, *, in_flight: int
    ) -> None:
        self.example = prompts[0]
        self._in_flight = in_flight
        self._check(*prompts, *([] if negative is None else [negative]))
        self._versions: list[list[tuple[int, torch.Tensor]]] = [[(0, prompt)] for prompt in prompts]
        self._negative = negative
        self._stacked: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def change(self, stream: int, first_chunk: int, prompt: torch.Tensor) -> None:
        """Let chunks from `first_chunk` on show another prompt; those before keep theirs.

        Raises:
            InputError: it is shaped unlike the others.
        """
        self._check(prompt)
        self._versions[stream].append((first_chunk, prompt))

    def of(self, rows: Sequence[Row]) -> torch.Tensor:
        """The prompts of rows, (rows, tokens, channels).

        As long as the prompts are the same it is the same tensor, so that what stages make of it is kept.
        """
        parts = [self._of(row) for row in rows]
        if len(parts) == 1:
            return parts[0]
        known = self._stacked.get(len(parts))
        if known is None or any(a is not b for a, b in zip(known[0], parts, strict=True)):
            known = self._stacked[len(parts)] = (parts, torch.cat(parts))
        return known[1]

    def _of(self, row: Row) -> torch.Tensor:
        if row.branch:
            if self._negative is None:
                raise InputError("guidance needs a negative prompt's embedding; that of an empty prompt will do.")
            return self._negative
        versions = self._versions[row.stream]
        while len(versions) > 1 and versions[1][0] <= row.chunk - self._in_flight:
            del versions[0]
        return next(prompt for first_chunk, prompt in reversed(versions) if first_chunk <= row.chunk)

    def _check(self, *prompts: torch.Tensor) -> None:
        for prompt in prompts:
            if prompt.shape != self.example.shape:
                raise InputError(
                    f"a prompt embedding is shaped {tuple(prompt.shape)}, but the stream's is {tuple(self.example.shape)}; "
                    "embed all prompts to the same length."
                )
