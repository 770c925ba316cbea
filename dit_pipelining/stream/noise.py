"""NoiseSource: noise that is the same whoever draws it, and whatever was drawn before."""

from collections.abc import Sequence

import numpy as np
import torch

KEPT = 8
"""Noise of a chunk that is remembered."""


class NoiseSource:
    """Normal noise keyed by stream, chunk and level.

    Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the key is the
    seed, and stream, chunk and level are the upper parts of the counter, so different keys never share numbers.

    Args:
        seed: of everything.
        shape: of the noise of one chunk.
        dtype, device: of the tensors.
    """

    def __init__(self, seed: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.seed = seed
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self._last: dict[tuple[int, int, int], torch.Tensor] = {}

    def __call__(self, stream: int, chunk: int, level: int) -> torch.Tensor:
        """The noise of shape `shape` with which a chunk enters a level; not to be written into."""
        key = (stream, chunk, level)
        if key not in self._last:  # the first and the last stage, if both are here, need the same
            while len(self._last) >= KEPT:
                del self._last[next(iter(self._last))]
            self._last[key] = self._draw(*key)
        return self._last[key]

    def _draw(self, stream: int, chunk: int, level: int) -> torch.Tensor:
        bits = np.random.Philox(key=self.seed % 2**128, counter=[0, level, chunk, stream])
        drawn = torch.from_numpy(np.random.Generator(bits).standard_normal(self.shape, dtype=np.float32))
        if self.device.type == "cuda":
            drawn = drawn.pin_memory()  # else the copy would wait for all that the GPU was given before
        return drawn.to(self.device, self.dtype, non_blocking=True)
