"""Spread a pipeline's transformers over the ranks of this launch."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.comm.components import make_owner_links
from dit_pipelining.comm.failure import Guard
from dit_pipelining.comm.mesh import Mesh, layout_of, line_group, new_group
from dit_pipelining.comm.transport import choose_transport
from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import CheckpointError, SplitError
from dit_pipelining.lowering.boundary import StagePlan
from dit_pipelining.runtime.attach import attach, attach_pipeline, resolve_inputs
from dit_pipelining.runtime.components import OwnedComponent
from dit_pipelining.runtime.executor import FillStage, TransformerExecutor
from dit_pipelining.runtime.lockstep import Lockstep
from dit_pipelining.runtime.owned import is_owned, own
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.sharding.groups import make_sequence_groups
from dit_pipelining.sharding.hsdp import ShardedBlocks, make_shard_mesh
from dit_pipelining.sharding.sequence import apply_sequence_parallel
from dit_pipelining.sharding.teams import Talk, Team, make_team_links
from dit_pipelining.sharding.tensor import apply_tensor_parallel, refuse_additions
from dit_pipelining.sharding.tensor_layers import Shard
from dit_pipelining.sharding.text_encoder_parts import TextEncoderParts
from dit_pipelining.sharding.text_plans import TextPlan
from dit_pipelining.sharding.vae_tiles import VaeTiles, switch_on
from dit_pipelining.weights.components import drop_weights
from dit_pipelining.weights.given import Untouched
from dit_pipelining.weights.load import load_weights, move_to, release_weights
from dit_pipelining.weights.pipelines import EmptyTransformer
from dit_pipelining.weights.placement import kind_of
from partitioners import Component


def cut_over_ranks(
    transformers: Mapping[str, nn.Module], config: ParallelConfig, device: torch.device
) -> dict[str, dict[str, Shard]]:
    """Leave each transformer, with weights or without, this rank's part of the layers that are tensor-parallel.

    Returns:
        for each transformer, which part of a tensor this is, by the tensor's name.
    """
    if config.tensor_parallel_size == 1:
        return {name: {} for name in transformers}
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = new_group(layout_of(config).groups("tensor"), timedelta(seconds=config.timeout_seconds), backend)
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL joins the ranks here, not between two stages
    return {
        name: apply_tensor_parallel(model, group, find_blocks(model, config.blocks))
        for name, model in transformers.items()
    }


def spread(
    pipeline: Any,
    transformers: Mapping[str, nn.Module],
    fill: Mapping[str, FillStage],
    owners: Mapping[str, int],
    teams: Mapping[str, Team],
    texts: Mapping[str, TextPlan],
    config: ParallelConfig,
    device: torch.device,
    guard: Guard,
) -> None:
    """Attach an executor to every transformer and to every component of one rank; put all others on this rank's device.

    Args:
        pipeline: a diffusers pipeline; it is changed in place.
        transformers: those of its components that are split, by name.
        fill: how each of them gets the weights of this rank's stage.
        owners: the rank, within its line, of each component that lives on one; elsewhere it has no weights.
        teams: the ranks that compute a component together, by its name: the tiles of a VAE, whose weights they all have, or
            the parts of a text encoder.
        texts: how text encoders are cut, those that are; this rank's part has been cut.
        config: degrees and partitioner.
        device: of this rank.
        guard: of this launch.
    """
    layout = layout_of(config)
    mesh = Mesh.of(layout, dist.get_rank())
    holders = {name: {owner} for name, owner in owners.items()}
    for name, own_team in teams.items():
        places = {Mesh.of(layout, rank).rank for rank in own_team.compute}
        holders[name] = places if name in texts else holders[name] | places
    parts = {name: (texts[name].elements, len(teams[name].compute)) for name in texts}
    shown = tuple(mesh.line[rank] for rank in config.shown_on())
    timeout = timedelta(seconds=config.timeout_seconds)
    transport = choose_transport(config, device, line_group(mesh, timeout))
    owner_links = make_owner_links(mesh, list(owners.values()), config.shown_on(), device, timeout, transport)
    rolling = Rolling(mesh, device, timeout, guard, transport)
    if config.sequence_parallel_size > 1:
        groups = make_sequence_groups(layout, mesh.world_rank, device, timeout)
        for model in transformers.values():
            apply_sequence_parallel(model, groups, uneven=config.ulysses_mode == "anything")
    shard_mesh = None
    if config.use_hsdp:
        assert config.hsdp_shard_size is not None  # the configuration has worked it out
        shard_mesh, sharing = make_shard_mesh(layout_of(config), config.hsdp_shard_size, device, timeout)
        replicas = sorted({mesh.layout.coordinates(rank)["cfg"] for rank in sharing})
        rolling.lockstep = Lockstep(replicas, mesh.replica)
    for name, model in transformers.items():
        if getattr(pipeline, name) is not model:
            raise SplitError(f"{type(pipeline).__name__} did not take over its component {name!r}; it cannot be split.")
        beside = held_beside(pipeline, name, transformers, owners, config, holders, parts)
        own_fill = _with_shared(fill[name], _shared_with_others(pipeline, name, model))
        sharded = (
            ShardedBlocks(shard_mesh, getattr(model, "_hsdp_shard_conditions", None) or ()) if shard_mesh else None
        )
        attach(model, TransformerExecutor(name, model, config, rolling, own_fill, beside, sharded))
        if config.tensor_parallel_size > 1:
            rolling.between_calls.append(partial(refuse_additions, model, frozenset(model.state_dict())))
    for name, component in pipeline.components.items():
        if not isinstance(component, nn.Module) or name in transformers:
            continue
        if name not in owners:
            component.to(device)
            resolve_inputs(name, component)
        elif not is_owned(component):  # one module can have two names
            team = teams.get(name)
            helps = team is not None and mesh.world_rank in team.compute
            _place(component, device, has_weights=helps or (owners[name] == mesh.rank and name not in texts))
            links = owner_links[owners[name]]
            is_decoder = kind_of(type(component)) == "decoder"
            owned = OwnedComponent(name, links, mesh.world_rank, is_decoder, shown, rolling)
            if team is not None:
                team_links = make_team_links(team, layout, device, timeout, transport)
                talk = Talk(team, team_links, mesh.world_rank, device, owned.watched)
                owned.team = (
                    TextEncoderParts(name, talk, guard.fail) if name in texts else VaeTiles(name, component, talk)
                )
                if name in texts:
                    rolling.between_calls.append(
                        partial(refuse_additions, component, frozenset(component.state_dict()), "text_encoder_tp_size")
                    )
                else:
                    switch_on(component)
            own(component, owned)
    if mesh.world_rank != 0:
        pipeline.set_progress_bar_config(disable=True)
    attach_pipeline(pipeline, rolling, shows=mesh.world_rank in shown)


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


def held_beside(
    pipeline: Any,
    name: str,
    transformers: Mapping[str, nn.Module],
    owners: Mapping[str, int],
    config: ParallelConfig,
    holders: Mapping[str, Collection[int]] = MappingProxyType({}),
    parts: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> list[Component]:
    """What the rank of each stage holds besides that stage of one transformer.

    That is its stage of every other transformer, about an even share, the components that it owns or that it helps to compute
    (`holders`, ranks within a line; default: the owners), its parts of text encoders that are cut (`parts`: the number of
    their elements and of parts), and those that every rank has; of the ranks of a stage in several replicas the one that
    holds most counts. A VAE that shall have a rank of its own has the one that owns it, else the last one.
    """
    stages = config.pipeline_parallel_size
    sizes = {key: _bytes(part) for key, part in pipeline.components.items() if isinstance(part, nn.Module)}
    for key, (elements, count) in parts.items():  # a part's own size would not be the same on every rank
        sizes[key] = elements * next(pipeline.components[key].parameters()).element_size() // count
    shares = stages * (config.hsdp_shard_size or 1)
    others = sum(sizes[other] for other in transformers if other != name) // shares
    everywhere = sum(size for key, size in sizes.items() if key not in transformers and key not in owners)
    owned = [
        sum(sizes.get(key, 0) for key, owner in owners.items() if rank in holders.get(key, (owner,)))
        for rank in range(config.line_size)
    ]
    alone = owners.get("vae", stages - 1) % stages if config.vae_placement == "shared" else None
    return [
        Component(
            f"other components of stage {stage}",
            bytes=others + everywhere + max(owned[stage::stages]),
            rank=stage,
            alone=stage == alone,
        )
        for stage in range(stages)
    ]


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def from_checkpoint(empty: EmptyTransformer, device: torch.device, shards: Mapping[str, Shard]) -> FillStage:
    """Fill a stage with its tensors of the checkpoint. What the caller has put into the model meanwhile is kept.

    Args:
        empty: the transformer; it is looked at now, when it is cut over ranks.
        device: of this rank.
        shards: which part of a tensor this rank holds, from `cut_over_ranks`.
    """
    untouched = Untouched(empty.model)

    def fill(plan: StagePlan, then: Mapping[str, Callable[[], object]]) -> None:
        checkpoint, quantised = empty.checkpoint, empty.quantised
        if isinstance(checkpoint, CheckpointError):
            raise checkpoint
        given = untouched.given(empty.model)
        if quantised is not None:
            quantised.read(empty.model, plan.weights, checkpoint)
            load = partial(quantised.load, empty.model, device=device, given=given)
        else:
            load = partial(
                load_weights,
                empty.model,
                checkpoint=checkpoint,
                device=device,
                torch_dtype=empty.torch_dtype,
                given=given,
                shards=shards,
            )
        for name, do in then.items():
            load(weights=[name])
            do()
        load(weights=plan.weights - then.keys())
        if quantised is not None:
            quantised.finish(empty.model)
        blocks = tuple(f"{name}." for name in find_blocks(empty.model))
        beside_blocks = [name for name in given if not name.startswith(blocks)]
        release_weights(empty.model, [*plan.weights, *beside_blocks])
        for name in beside_blocks:  # a later call may use them on any stage
            move_to(empty.model, name, device)

    return fill


def from_memory(model: nn.Module, device: torch.device) -> FillStage:
    """Keep a stage's weights of a model that is loaded, and drop the others."""

    def fill(plan: StagePlan, then: Mapping[str, Callable[[], object]]) -> None:
        release_weights(model, plan.weights)
        for name in sorted(plan.weights):
            move_to(model, name, device)
            then.get(name, lambda: None)()

    return fill
