"""What the ranks of a pipeline hold besides their stages of its transformers."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from dit_pipelining.comm.mesh import layout_of
from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.together import Others, others_of
from dit_pipelining.runtime.owned import text_parts
from dit_pipelining.runtime.placing import Places
from partitioners import Component


def held_beside(
    pipeline: Any, transformers: Collection[str], places: Places, config: ParallelConfig
) -> list[Component]:
    """What the rank of each stage holds besides its stages of the transformers.

    That is the components that it owns or that it helps to compute, its parts of text encoders that are cut, and the
    components that every rank has.
    """
    split = text_parts(pipeline.components)  # by another pipeline, and not of the same size on every rank
    parts = {key: part for key, part in pipeline.components.items() if isinstance(part, nn.Module) and key not in split}
    sizes = {key: _bytes(part) for key, part in parts.items()}
    for key, (elements, count) in places.part_sizes.items():  # a part's own size would not be the same on every rank
        sizes[key] = elements * next(pipeline.components[key].parameters()).element_size() // count
    everywhere = sum(size for key, size in sizes.items() if key not in transformers and key not in places.owners)
    holders = places.holders(layout_of(config))
    owned = [
        sum(sizes.get(key, 0) for key, ranks in holders.items() if rank in ranks) for rank in range(config.line_size)
    ]
    return of_stages([everywhere + own for own in owned], places, config)


def of_stages(
    held: Sequence[int], places: Places, config: ParallelConfig, seconds: Sequence[float] | None = None
) -> list[Component]:
    """What a partitioner is told of what ranks hold and do beside their stages.

    Of the ranks of a stage in several replicas the one that holds most counts. A VAE that shall have a rank of its own has the
    one that owns it, else the last one.

    Args:
        held: bytes of each rank of a line.
        places: of the components.
        config: how many stages there are, and whether the VAE has a rank of its own.
        seconds: of each rank of a line, per call of the transformer. Default: not known.
    """
    stages = config.pipeline_parallel_size
    seconds = seconds or [0.0] * len(held)
    alone = places.owners.get("vae", stages - 1) % stages if config.vae_placement == "shared" else None
    return [
        Component(
            f"other components of stage {stage}",
            max(seconds[stage::stages]),
            max(held[stage::stages]),
            rank=stage,
            alone=stage == alone,
        )
        for stage in range(stages)
    ]


def others_of_each(transformers: Mapping[str, nn.Module], config: ParallelConfig) -> dict[str, Others]:
    """What the ranks hold of the others while one transformer is cut, by its name.

    Args:
        transformers: of a pipeline, before they are cut over ranks and attached: then their classes and weights are others.
        config: how they are spread.
    """
    layout, shards = layout_of(config), config.hsdp_shard_size or 1

    def of(name: str) -> Others:
        others = [other for key, other in transformers.items() if key != name]
        return others_of(transformers[name], others, layout.pipeline, layout, shards, config.blocks)

    return {name: of(name) for name in transformers}


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
