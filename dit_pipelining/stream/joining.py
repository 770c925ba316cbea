"""Joining: connect this rank's stage of a stream to those of the other ranks of its pipeline."""

from datetime import timedelta
from typing import Any

from dit_pipelining.errors import ConfigError
from dit_pipelining.runtime.attach import EXECUTOR
from dit_pipelining.runtime.owned import owner_of
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.stream.layouts import Layouts
from dit_pipelining.stream.links import make_stream_links
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.rank import StreamRank
from dit_pipelining.stream.rebalance import Rebalancing
from dit_pipelining.stream.spec import StreamSpec
from dit_pipelining.stream.stage import StreamStage


def join_ranks(pipeline: Any, rolling: Rolling, spec: StreamSpec, stage: StreamStage, noise: NoiseSource) -> StreamRank:
    """Make the links between the ranks of a pipeline, or of one for each branch of guidance; every rank calls this.

    Args:
        pipeline: that is split over the ranks.
        rolling: its runtime.
        spec: of the streams.
        stage: of this rank.
        noise: the noise of chunks.

    Raises:
        ConfigError: there are more pipelines than branches, or the VAE is where no frames come out.
    """
    mesh = rolling.mesh
    if mesh.replicas > spec.branches:
        raise ConfigError(
            f"cfg_parallel_size={mesh.replicas}: a stream takes one pipeline per branch of guidance, and with "
            f"guidance_scale={spec.guidance_scale:g} there are {spec.branches}."
        )
    output, owner = mesh.ranks_of(0)[-1], owner_of(pipeline.vae)
    if owner not in (None, output):
        raise ConfigError(
            f"the VAE lives on rank {owner}, but a stream's frames are decoded on rank {output}, the last stage's; use "
            f"ParallelConfig(component_ranks={{'vae': {output}}})."
        )
    executor = pipeline.transformer.__dict__[EXECUTOR]
    seconds = executor.config.timeout_seconds
    pipelines = [mesh.ranks_of(replica) for replica in range(mesh.replicas)]
    sizes = Layouts(stage, noise).sizes()
    links = make_stream_links(pipelines, timedelta(seconds=seconds), rolling.transport, rolling.device, sizes)
    rolling.guard.on_failure(links.release_waits)
    return StreamRank(
        stage,
        mesh.stage,
        mesh.pipeline_size,
        links,
        noise,
        seconds,
        Rebalancing(executor) if executor.rebalancer is not None and mesh.replicas == 1 else None,
        is_twin=mesh.replica == 1,
        guidance_scale=spec.guidance_scale,
    )
