"""Prompt embeddings made directly, for pipelines whose text encoder needs a processor for pictures as well."""

from collections.abc import Callable

import torch


def embeds(*shape: int, seed: int = 0, scale: float = 1.0) -> Callable[[], torch.Tensor]:
    """Makes a float32 tensor of normal values, the same at each call."""
    return lambda: torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def ones(*shape: int, dtype: torch.dtype = torch.int64) -> Callable[[], torch.Tensor]:
    """Makes a mask that keeps everything."""
    return lambda: torch.ones(shape, dtype=dtype)
