"""Spread a pipeline's transformers over the ranks of this launch."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.comm.failure import Guard
from dit_pipelining.comm.mesh import Mesh
from dit_pipelining.comm.transport import choose_transport
from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import SplitError
from dit_pipelining.lowering.boundary import StagePlan
from dit_pipelining.runtime.attach import attach, attach_pipeline, resolve_inputs
from dit_pipelining.runtime.executor import FillStage, TransformerExecutor
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.weights.load import load_weights, release_weights
from dit_pipelining.weights.pipelines import EmptyTransformer
from partitioners import Component


def spread(
    pipeline: Any,
    transformers: Mapping[str, nn.Module],
    fill: Mapping[str, FillStage],
    config: ParallelConfig,
    device: torch.device,
    guard: Guard,
) -> None:
    """Attach an executor to every transformer, and put all other components on this rank's device.

    Args:
        pipeline: a diffusers pipeline; it is changed in place.
        transformers: those of its components that are split, by name.
        fill: how each of them gets the weights of this rank's stage.
        config: degrees and partitioner.
        device: of this rank.
        guard: of this launch.
    """
    mesh = Mesh(dist.get_rank(), config.pipeline_parallel_size, config.cfg_parallel_size)
    timeout = timedelta(seconds=config.timeout_seconds)
    transport = choose_transport(config, device, dist.new_group(timeout=timeout, backend="gloo"))
    rolling = Rolling(mesh, device, timeout, guard, transport)
    for name, model in transformers.items():
        if getattr(pipeline, name) is not model:
            raise SplitError(f"{type(pipeline).__name__} did not take over its component {name!r}; it cannot be split.")
        beside = held_beside(pipeline, name, transformers, config)
        attach(model, TransformerExecutor(name, model, config, rolling, fill[name], beside))
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and name not in transformers:
            component.to(device)
            resolve_inputs(component)
    if mesh.rank != 0:
        pipeline.set_progress_bar_config(disable=True)
    attach_pipeline(pipeline, rolling)


def held_beside(
    pipeline: Any, name: str, transformers: Mapping[str, nn.Module], config: ParallelConfig
) -> list[Component]:
    """What the rank of each stage holds besides that stage of one transformer.

    That is its stage of every other transformer, about an even share, and all other components. A VAE that shall have a rank
    of its own has the last one.
    """
    stages = config.pipeline_parallel_size
    others = sum(_bytes(model) for other, model in transformers.items() if other != name) // stages
    modules = (part for key, part in pipeline.components.items() if key not in transformers)
    held = others + sum(_bytes(part) for part in modules if isinstance(part, nn.Module))
    alone = stages - 1 if config.vae_placement == "shared" else None
    return [Component(f"other components of stage {i}", bytes=held, rank=i, alone=i == alone) for i in range(stages)]


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def from_checkpoint(empty: EmptyTransformer, device: torch.device) -> FillStage:
    """Fill a stage with its tensors of the checkpoint."""

    def fill(plan: StagePlan) -> None:
        load_weights(empty.model, plan.weights, empty.checkpoint, device, empty.torch_dtype)

    return fill


def from_memory(model: nn.Module, device: torch.device) -> FillStage:
    """Keep a stage's weights of a model that is loaded, and drop the others."""

    def fill(plan: StagePlan) -> None:
        release_weights(model, plan.weights)
        for name in plan.weights:
            _move(model, name, device)

    return fill


def _move(model: nn.Module, name: str, device: torch.device) -> None:
    path, _, key = name.rpartition(".")
    owner = model.get_submodule(path)
    value = getattr(owner, key)
    if isinstance(value, nn.Module):
        value.to(device)
    elif key in owner._buffers:
        owner._buffers[key] = value.to(device)
    else:
        value.data = value.data.to(device)
