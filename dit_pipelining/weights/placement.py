"""Which rank holds which of a pipeline's components that are not split: a pure function of kinds and sizes.

What goes to one rank: text and image encoders, safety checkers and language models (models of the transformers library),
VAEs and vocoders: they run before or after the denoising loop. Everything else (ControlNets, adapters, connectors, reward
models, ...) stays on every rank, since what is called in the loop would cost a transfer there. The rule is about speed:
a component gives the same results wherever it lies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import transformers

AUTOENCODERS = "diffusers.models.autoencoders."
"""Where diffusers keeps VAEs and what else turns latents into pictures and sound."""

WORTH_MOVING = 0.1
"""A component leaves the first rank if that takes this share off the rank that holds most."""

Kind = Literal["encoder", "decoder"]
Placement = int | Literal["all"]


@dataclass(frozen=True)
class ComponentSize:
    """What placing needs to know.

    Attributes:
        kind: of the component.
        bytes: of its weights.
        tiles: its tiles can be spread over ranks.
        text: it may be a text encoder.
        parts: into how many parts it is cut; each rank has one.
        ranks: that have a part, of those among which it is placed: its owner and the ones after it.
    """

    kind: Kind
    bytes: int
    tiles: bool = False
    text: bool = False
    parts: int = 1
    ranks: int = 1

    def holders(self, owner: int, world_size: int) -> list[int]:
        """The ranks that have a part, or all of it."""
        return [(owner + i) % world_size for i in range(self.ranks)]


def kind_of(cls: type) -> Kind | None:
    """Whether a component of this class goes to one rank, as what; None: it stays on every rank."""
    if any(base.__module__.startswith(AUTOENCODERS) for base in cls.__mro__) or "Vocoder" in cls.__name__:
        return "decoder"
    if issubclass(cls, transformers.PreTrainedModel):
        # A vocoder of the transformers library: it makes sound of what a VAE has decoded.
        return "decoder" if "HifiGan" in cls.__name__ else "encoder"
    return None


def place_components(
    components: Mapping[str, ComponentSize],
    world_size: int,
    output_ranks: Sequence[int],
    chosen: Mapping[str, Placement] | None = None,
) -> dict[str, int]:
    """Choose the rank of each component.

    Decoders go to the last of the ranks that return results, so that pixels need not travel there; encoders to the first
    rank. Then, as long as it takes at least a tenth off the rank that holds most, an encoder of that rank moves to
    the rank that holds least: Llama and T5 of HiDream get a rank each, the small CLIP beside T5 of FLUX stays.

    Args:
        components: by name.
        world_size: number of ranks.
        output_ranks: those that return results.
        chosen: ranks that the user chose; `"all"`: the component is not placed.

    Returns:
        the owner of each component; those on every rank are left out.
    """
    chosen = chosen or {}
    placed = {name: part for name, part in components.items() if chosen.get(name) != "all"}
    owners = {}
    for name, part in placed.items():
        default = max(output_ranks) if part.kind == "decoder" else 0
        owners[name] = int(chosen.get(name, default))
    movable = [name for name, part in placed.items() if part.kind == "encoder" and name not in chosen]
    while move := _best_move(placed, owners, movable, world_size):
        name, rank = move
        owners[name] = rank
    return owners


def _best_move(
    components: Mapping[str, ComponentSize], owners: Mapping[str, int], movable: Sequence[str], world_size: int
) -> tuple[str, int] | None:
    loads = _loads(components, owners, world_size)
    heaviest, lightest = loads.index(max(loads)), loads.index(min(loads))
    best, best_load = None, (1 - WORTH_MOVING) * loads[heaviest]
    for name in movable:
        part = components[name]
        before = part.holders(owners[name], world_size)
        for target in range(world_size) if part.parts > 1 else [lightest]:
            after = _loads(components, {**owners, name: target}, world_size)
            load = max(after[rank] for rank in {*before, *part.holders(target, world_size)})
            if heaviest in before and load <= best_load and load < loads[heaviest]:
                best, best_load = (name, target), load
    return best


def _loads(components: Mapping[str, ComponentSize], owners: Mapping[str, int], world_size: int) -> list[int]:
    loads = [0] * world_size
    for name, owner in owners.items():
        part = components[name]
        for rank in part.holders(owner, world_size):
            loads[rank] += part.bytes // part.parts
    return loads
