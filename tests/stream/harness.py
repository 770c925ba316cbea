"""Builds the stages of a stream in this process, as the tests use them."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel

from dit_pipelining.api import split_model
from dit_pipelining.stream.head import Levels, StreamInput
from dit_pipelining.stream.kv_cache import DistributedKVCache
from dit_pipelining.stream.layouts import Layouts
from dit_pipelining.stream.links import make_stream_links
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.one_process import run_in_one_process
from dit_pipelining.stream.prompts import Prompts
from dit_pipelining.stream.rank import StreamRank
from dit_pipelining.stream.spec import StreamSpec
from dit_pipelining.stream.stage import StreamStage
from dit_pipelining.stream.tail import FinishedChunk
from tests.stream import reference

CPU = torch.device("cpu")


def stages(
    model: WanTransformer3DModel, spec: StreamSpec, counts: Sequence[int], batched: bool = True, prompts: Any = None
) -> list[StreamStage]:
    """All stages in this process, on the model's device."""
    dtype, device = model.dtype, model.device
    example = dict(
        hidden_states=torch.zeros(reference.SHAPE, dtype=dtype, device=device),
        timestep=torch.zeros(1, device=device),
        encoder_hidden_states=torch.zeros(reference.TEXT, dtype=dtype, device=device),
        return_dict=False,
    )
    split = split_model(model, len(counts), example, counts=counts)
    own = prompts or [reference.text(10 + stream, dtype) for stream in range(spec.streams)]
    own = [text.to(device) for text in own]
    known = Prompts(own, reference.text(99, dtype).to(device), in_flight=spec.passes * len(counts))
    caches = DistributedKVCache(spec)
    return [
        StreamStage(split, index, spec, reference.SHAPE, known, caches, device, batched) for index in range(len(counts))
    ]


def noise(dtype: torch.dtype, device: torch.device = CPU) -> NoiseSource:
    return NoiseSource(0, reference.SHAPE, torch.float64 if dtype == torch.float64 else torch.float32, device)


def run(
    made: Sequence[StreamStage], inputs: Sequence[Sequence[StreamInput]], levels: Levels | None = None
) -> tuple[list[list[torch.Tensor]], list[FinishedChunk]]:
    """Finished latents of each stream, and everything in the order in which it came."""
    sources = [iter(own) for own in inputs]
    with torch.no_grad():
        finished = list(run_in_one_process(made, sources, noise(made[0].dtype, made[0].device), levels))
    streams: list[list[torch.Tensor]] = [[] for _ in inputs]
    for chunk in finished:
        assert chunk.index == len(streams[chunk.stream])
        streams[chunk.stream].append(chunk.latents)
    return streams, finished


class Script:
    """Changes the levels from given chunks on."""

    def __init__(self, changes: dict[int, tuple[float, ...]]) -> None:
        self.changes = dict(changes)
        self.chunks = 0

    def started(self, waited: bool) -> None:
        self.chunks += 1

    def wanted(self, busy: float) -> tuple[float, ...] | None:
        return self.changes.pop(self.chunks, None)


def rank(
    model: WanTransformer3DModel,
    spec: StreamSpec,
    counts: Sequence[int],
    prompts: Any = None,
    transport: str = "host",
) -> StreamRank:
    """This rank's part of a pipeline over all ranks of the group; rows run one by one.

    With twice as many ranks as stages, the second half is the twin that runs the rows without the prompt.
    """
    timeout = timedelta(seconds=60)
    if dist.get_world_size() == 2 * len(counts):
        return _twins(model, spec, counts, prompts, timeout, transport)
    own = dist.get_rank()
    stage = stages(model, spec, counts, batched=False, prompts=prompts)[own]
    sizes = Layouts(stage, noise(model.dtype)).sizes()
    links = make_stream_links([range(len(counts))], timeout, transport, CPU, sizes)
    return StreamRank(stage, own, len(counts), links, noise(model.dtype), timeout.total_seconds())


def _twins(
    model: WanTransformer3DModel,
    spec: StreamSpec,
    counts: Sequence[int],
    prompts: Any,
    timeout: timedelta,
    transport: str,
) -> StreamRank:
    replica, own = divmod(dist.get_rank(), len(counts))
    pipelines = [range(first, first + len(counts)) for first in (0, len(counts))]
    if replica:
        prompts = [reference.text(99, model.dtype)] * spec.streams
    plain = replace(spec, guidance_scale=1.0)
    stage = stages(model, plain, counts, batched=False, prompts=prompts)[own]
    links = make_stream_links(pipelines, timeout, transport, CPU, Layouts(stage, noise(model.dtype)).sizes())
    seconds = timeout.total_seconds()
    guidance = dict(is_twin=replica == 1, guidance_scale=spec.guidance_scale)
    return StreamRank(stage, own, len(counts), links, noise(model.dtype), seconds, **guidance)
