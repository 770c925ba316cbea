"""Spread a pipeline's transformers over the ranks of this launch."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.comm.failure import Guard
from dit_pipelining.comm.launch import Launch
from dit_pipelining.comm.mesh import Mesh, backend_of, layout_of, line_group, new_group
from dit_pipelining.comm.sender_links import make_sender_links
from dit_pipelining.comm.transport import choose_transport
from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import SplitError
from dit_pipelining.runtime.attach import attach, attach_pipeline, resolve_inputs
from dit_pipelining.runtime.beside import held_beside, others_of_each
from dit_pipelining.runtime.checks import check_splits
from dit_pipelining.runtime.components import OwnedComponent
from dit_pipelining.runtime.executor import FillStage, TransformerExecutor
from dit_pipelining.runtime.filling import from_memory
from dit_pipelining.runtime.lockstep import Lockstep
from dit_pipelining.runtime.owned import is_owned, own, text_parts
from dit_pipelining.runtime.placing import Places, choose_places, plan_with
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.sharding.groups import make_sequence_groups
from dit_pipelining.sharding.hsdp import ShardedBlocks, make_shard_mesh
from dit_pipelining.sharding.sequence import apply_sequence_parallel
from dit_pipelining.sharding.teams import Talk, make_team_groups, make_team_links
from dit_pipelining.sharding.tensor import apply_tensor_parallel, refuse_additions
from dit_pipelining.sharding.tensor_layers import Shard
from dit_pipelining.sharding.text_encoder_parts import TextEncoderParts
from dit_pipelining.sharding.vae_tiles import VaeTiles, switch_on
from dit_pipelining.weights.components import components_in_memory, drop_weights
from dit_pipelining.weights.empty import empty_copy
from dit_pipelining.weights.placement import kind_of
from dit_pipelining.weights.text_encoders import cut_in_memory


def kept_whole(transformers: Mapping[str, nn.Module], config: ParallelConfig) -> dict[str, nn.Module]:
    """What each transformer is before `cut_over_ranks`: what is to be cut has a copy without weights."""
    return {
        name: empty_copy(model) if config.tensor_parallel_size > 1 else model for name, model in transformers.items()
    }


def cut_over_ranks(
    transformers: Mapping[str, nn.Module], config: ParallelConfig, device: torch.device
) -> dict[str, dict[str, Shard]]:
    """Leave each transformer, with weights or without, this rank's part of the layers that are tensor-parallel.

    Returns:
        for each transformer, which part of a tensor this is, by the tensor's name.
    """
    if config.tensor_parallel_size == 1:
        return {name: {} for name in transformers}
    timeout = timedelta(seconds=config.timeout_seconds)
    group = new_group(layout_of(config).groups("tensor"), timeout, backend_of(device))
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL joins the ranks here, not between two stages
    return {
        name: apply_tensor_parallel(model, group, find_blocks(model, config.blocks))
        for name, model in transformers.items()
    }


def split_in_memory(
    pipeline: Any, transformers: Mapping[str, nn.Module], config: ParallelConfig, launch: Launch
) -> None:
    """Spread a pipeline that every rank has in memory; each drops what is not its own."""
    check_splits(config, transformers)
    components = pipeline.components
    sizes = components_in_memory(components)
    places = choose_places(config, sizes, transformers, plan_with(components.__getitem__), text_parts(components))
    device = launch.join()
    whole = kept_whole(transformers, config)
    cut_over_ranks(transformers, config, device)
    teams = {name: places.teams[name] for name in places.texts}
    groups = make_team_groups(teams, layout_of(config), device, launch.timeout)
    cut_in_memory({name: components[name] for name in places.texts}, places.texts, groups)
    fill = {name: from_memory(model, device) for name, model in transformers.items()}
    spread(pipeline, transformers, whole, fill, places, config, device, launch.guard)


def spread(
    pipeline: Any,
    transformers: Mapping[str, nn.Module],
    whole: Mapping[str, nn.Module],
    fill: Mapping[str, FillStage],
    places: Places,
    config: ParallelConfig,
    device: torch.device,
    guard: Guard,
) -> None:
    """Attach an executor to every transformer and to every component of one rank; put all others on this rank's device.

    Args:
        pipeline: a diffusers pipeline; it is changed in place.
        transformers: those of its components that are split, by name.
        whole: the same before they were cut over ranks, from `kept_whole`.
        fill: how each of them gets the weights of this rank's stage.
        places: of the other components; this rank's parts of text encoders have been cut.
        config: degrees and partitioner.
        device: of this rank.
        guard: of this launch.
    """
    mesh = Mesh.of(layout_of(config), dist.get_rank())
    shown = tuple(mesh.line[rank] for rank in config.shown_on())
    timeout = timedelta(seconds=config.timeout_seconds)
    transport = choose_transport(config, device, line_group(mesh, timeout))
    links = make_sender_links(mesh, list(places.owners.values()), config.shown_on(), device, timeout, transport)
    rolling = Rolling(mesh, device, timeout, guard, transport)
    _attach_transformers(pipeline, transformers, whole, fill, places, config, rolling, timeout)
    for name, component in pipeline.components.items():
        if not isinstance(component, nn.Module) or name in transformers:
            continue
        if is_owned(component):  # under another name, or another pipeline's
            continue
        if name not in places.owners:
            component.to(device)
            resolve_inputs(name, component)
        else:
            _place(component, device, has_weights=places.has_weights(name, mesh))
            is_decoder = kind_of(type(component)) == "decoder"
            owned = OwnedComponent(name, links[places.owners[name]], mesh.world_rank, is_decoder, shown, rolling)
            if name in places.teams:
                _join_team(component, owned, places, timeout)
            own(component, owned)
    attach_pipeline(pipeline, rolling, shows=mesh.world_rank in shown)


def _attach_transformers(
    pipeline: Any,
    transformers: Mapping[str, nn.Module],
    whole: Mapping[str, nn.Module],
    fill: Mapping[str, FillStage],
    places: Places,
    config: ParallelConfig,
    rolling: Rolling,
    timeout: timedelta,
) -> None:
    mesh, device = rolling.mesh, rolling.device
    if config.sequence_parallel_size > 1:
        groups = make_sequence_groups(mesh.layout, mesh.world_rank, device, timeout)
        for model in transformers.values():
            apply_sequence_parallel(model, groups, uneven=config.ulysses_mode == "anything")
    shard_mesh = None
    if config.use_hsdp:
        assert config.hsdp_shard_size is not None  # the configuration has worked it out
        shard_mesh, sharing = make_shard_mesh(mesh.layout, config.hsdp_shard_size, device, timeout)
        replicas = sorted({mesh.layout.coordinates(rank)["cfg"] for rank in sharing})
        rolling.lockstep = Lockstep(replicas, mesh.replica)
    beside = held_beside(pipeline, transformers, places, config)
    others = others_of_each(whole, config)
    for name, model in transformers.items():
        if getattr(pipeline, name) is not model:
            raise SplitError(f"{type(pipeline).__name__} did not take over its component {name!r}; it cannot be split.")
        own_fill = _with_shared(fill[name], _shared_with_others(pipeline, name, model))
        sharded = (
            ShardedBlocks(shard_mesh, getattr(model, "_hsdp_shard_conditions", None) or ()) if shard_mesh else None
        )
        executor = TransformerExecutor(
            name, model, whole[name], config, rolling, own_fill, beside, others[name], sharded
        )
        attach(model, executor)
        if config.tensor_parallel_size > 1:
            rolling.between_calls.append(partial(refuse_additions, model, frozenset(model.state_dict())))


def _join_team(component: nn.Module, owned: OwnedComponent, places: Places, timeout: timedelta) -> None:
    """Let this rank take part in the calls of a component that several ranks compute together."""
    name, rolling = owned.name, owned.rolling
    team, device = places.teams[name], rolling.device
    links = make_team_links(team, rolling.mesh.layout, device, timeout, rolling.transport)
    talk = Talk(team, links, rolling.mesh.world_rank, device, owned.watched)
    if name in places.texts:
        owned.team = TextEncoderParts(name, talk, rolling.guard.fail)
        known = frozenset(component.state_dict())
        rolling.between_calls.append(partial(refuse_additions, component, known, "text_encoder_tp_size"))
    else:
        owned.team = VaeTiles(name, component, talk)
        switch_on(component)


def _place(component: nn.Module, device: torch.device, *, has_weights: bool) -> None:
    if has_weights:
        component.to(device)
        return
    drop_weights(component)
    for module in component.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _shared_with_others(pipeline: Any, name: str, model: nn.Module) -> frozenset[str]:
    """Names of the transformer's parameters that are another component's too: Z-Image's ControlNet uses its embedders."""
    others = [part for other, part in pipeline.components.items() if other != name and isinstance(part, nn.Module)]
    theirs = {id(parameter) for part in others for _, parameter in part.named_parameters(remove_duplicate=False)}
    return frozenset(key for key, own in model.named_parameters(remove_duplicate=False) if id(own) in theirs)


def _with_shared(fill: FillStage, shared: frozenset[str]) -> FillStage:
    """Every rank keeps what others share, since they run on every rank."""
    return lambda plan, then: fill(replace(plan, weights=plan.weights | shared), then)
