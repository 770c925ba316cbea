"""Stages of a stream around a transformer, without a pipeline; for benchmarks."""

from collections.abc import Sequence
from typing import Any

import torch

from dit_pipelining.api import SplitModel, StreamSpec, split_model
from dit_pipelining.stream.kv_cache import DistributedKVCache
from dit_pipelining.stream.prompts import Prompts


def split_of(model: Any, shape: tuple[int, ...], text: torch.Tensor, counts: Sequence[int]) -> SplitModel:
    """The transformer in stages of so many blocks, for chunks of this shape."""
    example = dict(
        hidden_states=torch.zeros(shape, device=model.device, dtype=model.dtype),
        timestep=torch.zeros(1, device=model.device),
        encoder_hidden_states=text,
        return_dict=False,
    )
    return split_model(model, len(counts), example, counts=counts)


def stages_of(
    split: SplitModel, spec: StreamSpec, shape: tuple[int, ...], text: torch.Tensor, indices: Sequence[int], cls: Any
) -> list[Any]:
    """Some of a split's stages, of a class derived from StreamStage."""
    prompts = Prompts([text], in_flight=spec.passes * split.num_stages)
    caches = DistributedKVCache(spec)
    return [cls(split, index, spec, shape, prompts, caches, text.device) for index in indices]
