"""Decide which ranks hold and compute a pipeline's encoders and VAEs, before anything is loaded."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dit_pipelining.comm.launch import launched_rank
from dit_pipelining.comm.layout import Layout
from dit_pipelining.comm.mesh import Mesh, layout_of
from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.by_weight import owners_by_weight
from dit_pipelining.costs.machine import machine_of
from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.teams import Team, team_of
from dit_pipelining.sharding.text_encoder import check_text_encoder
from dit_pipelining.sharding.text_plans import TextPlan
from dit_pipelining.weights.placement import ComponentSize, place_components
from partitioners import Component


@dataclass(frozen=True)
class Places:
    """Where a pipeline's encoders and VAEs live.

    Attributes:
        owners: the rank, within its line, of each component that lives on one; elsewhere it has no weights.
        teams: the ranks that compute a component together, by its name: the tiles of a VAE, whose weights they all have, or
            the parts of a text encoder.
        texts: how text encoders are cut, those that are.
    """

    owners: Mapping[str, int]
    teams: Mapping[str, Team]
    texts: Mapping[str, TextPlan]

    @property
    def part_sizes(self) -> dict[str, tuple[int, int]]:
        """Of each text encoder that is cut, the number of its elements and of its parts."""
        return {name: (plan.elements, len(self.teams[name].compute)) for name, plan in self.texts.items()}

    def computing(self, name: str, layout: Layout) -> tuple[int, ...]:
        """The ranks, within a line, that compute the calls of a component, its owner first; all where it is on every rank."""
        if name not in self.owners:
            return tuple(range(layout.cfg * layout.pipeline))
        if name not in self.teams:
            return (self.owners[name],)
        return tuple(dict.fromkeys(Mesh.of(layout, rank).rank for rank in self.teams[name].compute))

    def holders(self, layout: Layout) -> dict[str, set[int]]:
        """The ranks, within a line, that have weights of each component that is not on every rank."""
        return {
            name: set(self.computing(name, layout)) | ({owner} if name not in self.texts else set())
            for name, owner in self.owners.items()
        }

    def has_weights(self, name: str, mesh: Mesh) -> bool:
        """Whether this rank has weights of a component."""
        if name in self.teams and mesh.world_rank in self.teams[name].compute:
            return True
        return self.owners[name] == mesh.rank and name not in self.texts


def choose_places(
    config: ParallelConfig,
    components: Mapping[str, ComponentSize],
    models: Mapping[str, nn.Module],
    plan: Callable[[str, int], TextPlan],
    split: Mapping[str, int],
) -> Places:
    """Choose the rank of each component, by its kind and size.

    Args:
        config: may bind components to ranks, cut text encoders, and spread tiles of VAEs.
        components: those that can go to one rank.
        models: the transformers, beside whose stages they lie.
        plan: says of a text encoder, by its name, how it is cut over so many ranks, or why it cannot be.
        split: over how many ranks text encoders are split already, by another pipeline: they stay as they are.

    Raises:
        ConfigError: the configuration names components that are not there, or asks for parts that cannot be.
    """
    for name, parts in split.items():
        if (size := config.text_encoder_size(name)) not in (1, parts):
            raise ConfigError(
                f"text_encoder_tp_size={size} for the component {name!r}, which another pipeline has split over {parts} ranks "
                f"already. Give {parts}, or leave the component out, so that this pipeline loads its own."
            )
    components = {name: part for name, part in components.items() if name not in split}
    texts = _text_plans(config, components, plan, split)
    components = _with_parts(config, components, texts)
    owners = _owners(config, components, models)
    return Places(owners, _teams(config, components, owners), texts)


def plan_with(encoder: Callable[[str], Any]) -> Callable[[str, int], TextPlan]:
    """How text encoders are cut, for `choose_places`; `encoder` gives one by its name, with weights or without."""
    return lambda name, size: check_text_encoder(name, encoder(name), size)


def _owners(
    config: ParallelConfig, components: Mapping[str, ComponentSize], models: Mapping[str, nn.Module]
) -> dict[str, int]:
    """The rank of each component.

    With `vae-aware` on ranks of limited memory, those that the configuration does not bind go where they fit beside blocks.
    """
    config.check_component_ranks(components)
    chosen = config.component_ranks or {}
    owners = place_components(components, config.line_size, config.shown_on(), chosen)
    target = machine_of(config)
    if config.partitioner != "vae-aware" or not target.has_limits:
        return owners
    bound = {
        name: name in chosen or (components[name].kind == "decoder" and config.output_ranks != "all") for name in owners
    }
    stages = config.pipeline_parallel_size
    whole = {name: owner for name, owner in owners.items() if components[name].parts == 1}
    sizes = [
        Component(
            name,
            bytes=components[name].bytes,
            rank=owner % stages if bound[name] else None,
            preferred_rank=owner % stages,
        )
        for name, owner in whole.items()
    ]
    sizes += [
        Component(f"{name} on rank {rank}", bytes=components[name].bytes // components[name].parts, rank=rank % stages)
        for name in owners.keys() - whole.keys()
        for rank in components[name].holders(owners[name], config.line_size)
    ]
    layout, shards = layout_of(config), config.hsdp_shard_size or 1
    placed = owners_by_weight(models.values(), config.blocks, target, sizes, layout, shards)
    return owners | {name: owner if placed[name] == owner % stages else placed[name] for name, owner in whole.items()}


def _text_plans(
    config: ParallelConfig,
    components: Mapping[str, ComponentSize],
    plan: Callable[[str, int], TextPlan],
    split: Collection[str],
) -> dict[str, TextPlan]:
    """How each text encoder is cut that is to be, by its name."""
    sizes = config.text_encoder_tp_size
    everywhere = [name for name, place in (config.component_ranks or {}).items() if place == "all"]
    known = [name for name, part in components.items() if part.text and name not in everywhere]
    unknown = [name for name in sizes if name not in (*known, *split)] if isinstance(sizes, Mapping) else []
    if unknown or (sizes != 1 and not known and not split):
        raise ConfigError(
            f"text_encoder_tp_size={sizes}: the text encoders of this pipeline that are not on every rank are "
            f"{', '.join(map(repr, known)) or 'none'}."
        )
    cut = {name: size for name in known if (size := config.text_encoder_size(name)) > 1}
    return {name: plan(name, size) for name, size in cut.items()}


def _with_parts(
    config: ParallelConfig, components: Mapping[str, ComponentSize], texts: Mapping[str, TextPlan]
) -> dict[str, ComponentSize]:
    """Say of the components that are cut how many ranks of a line have a part."""
    lines = config.copy_size // config.line_size
    sizes = {name: config.text_encoder_size(name) for name in texts}
    return {
        name: replace(part, parts=sizes[name], ranks=math.ceil(sizes[name] / lines)) if name in sizes else part
        for name, part in components.items()
    }


def _teams(
    config: ParallelConfig, components: Mapping[str, ComponentSize], owners: Mapping[str, int]
) -> dict[str, Team]:
    """The ranks that compute each component which several compute together: VAEs by tiles, text encoders by parts."""
    layout, rank = layout_of(config), launched_rank()
    teams = {
        name: team_of(layout, rank, owners[name], part.parts, towards=1)
        for name, part in components.items()
        if part.parts > 1
    }
    size = config.vae_patch_parallel_size
    if size == 1:
        return teams
    names = [name for name, part in components.items() if part.tiles and name in owners]
    if not names:
        raise ConfigError(
            f"vae_patch_parallel_size={size}: this pipeline has no VAE on one rank whose tiling can be spread over several "
            f"(its components on one rank: {', '.join(owners) or 'none'}). Leave it at 1."
        )
    return teams | {name: team_of(layout, rank, owners[name], size, towards=-1) for name in names}
