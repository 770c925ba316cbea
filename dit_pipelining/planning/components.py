"""What stands beside the transformers: encoders and the VAE, their bytes and seconds, and where a run puts them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from dit_pipelining.comm.mesh import layout_of
from dit_pipelining.config import ParallelConfig
from dit_pipelining.costs.devices import HALF_PRECISION_BYTES, DeviceProfile, Link
from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.planning.beside import Beside
from dit_pipelining.planning.models import ModelSpec
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.text_encoders import Encoder
from dit_pipelining.planning.tiles import latents_of, tells_tiles, tile_sizes
from dit_pipelining.planning.timeline import ComponentCall
from dit_pipelining.planning.vae_profile import build_vae
from dit_pipelining.runtime.beside import of_stages
from dit_pipelining.runtime.placing import Places, choose_places
from dit_pipelining.sharding.text_plans import TextPlan
from dit_pipelining.sharding.tile_ranks import assign_tiles
from dit_pipelining.weights.placement import ComponentSize
from partitioners import Component

NO_MODELS: Mapping[str, nn.Module] = {}


@dataclass(frozen=True)
class HeldBeside:
    """Bytes that one rank needs for components.

    Attributes:
        encoders, vae: weights.
        decode: activations of the VAE at their fullest.
    """

    encoders: int = 0
    vae: int = 0
    decode: int = 0


@dataclass(frozen=True)
class Placed:
    """Components on the ranks of a line.

    Attributes:
        places: as a run chooses them.
        held: of each rank.
        encodes, decodes: what they do for one request, in order.
    """

    places: Places
    held: tuple[HeldBeside, ...] = ()
    encodes: tuple[ComponentCall, ...] = ()
    decodes: tuple[ComponentCall, ...] = ()

    def held_by(self, rank: int) -> HeldBeside:
        """What a rank holds."""
        return self.held[rank] if self.held else HeldBeside()

    def for_partitioner(self, config: ParallelConfig, calls: int) -> list[Component]:
        """What the rank of each stage holds and does.

        Args:
            config: that places them.
            calls: of the transformer in one request, over which the seconds are spread.
        """
        every = (*self.encodes, *self.decodes)
        seconds = [
            sum(call.seconds / calls for call in every if call.ranks is None or rank in call.ranks)
            for rank in range(config.line_size)
        ]
        return of_stages([own.encoders + own.vae + own.decode for own in self.held], self.places, config, seconds)


NOTHING = Placed(Places({}, {}, {}))
"""No components."""


@dataclass(frozen=True)
class Components:
    """The components of a pipeline beside its transformers, by name.

    Attributes:
        sizes: what a run places them by: their files where they are there, else what they hold.
        held: bytes of their weights.
        seconds: of each for one request, on one rank; of a VAE without tiles.
        decode_bytes: of the VAE's activations at their fullest, while it decodes without tiling.
        encoders: those of text and images.
        tokens: of the prompts of one request.
        itemsize: bytes of an element of the weights.
        link: between the ranks over which text encoders are split.
        latents: number of elements that are decoded.
        tiles: of the VAE's own tiling, their numbers of elements, those side by side that are computed at a time; empty:
            not known.
    """

    sizes: Mapping[str, ComponentSize] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    decode_bytes: int = 0
    encoders: Mapping[str, Encoder] = field(default_factory=dict)
    tokens: int = 0
    itemsize: int = 0
    link: Link | None = None
    latents: int = 0
    tiles: tuple[tuple[int, ...], ...] = ()

    def decode(self, ranks: int) -> tuple[float, int]:
        """Seconds and bytes of activations of a decode on so many ranks; one computes without tiles, more share them."""
        seconds = self.seconds.get("vae", 0.0)
        if ranks == 1 or not self.tiles:
            return seconds, self.decode_bytes
        loads = 0.0
        for batch in self.tiles:
            owners = assign_tiles(batch, [1.0] * ranks)
            loads += max(
                sum(cost for cost, own in zip(batch, owners, strict=True) if own == rank) for rank in range(ranks)
            )
        largest = max(cost for batch in self.tiles for cost in batch)
        return seconds * loads / self.latents, math.ceil(self.decode_bytes * largest / self.latents)

    def placed(self, config: ParallelConfig, models: Mapping[str, nn.Module] = NO_MODELS) -> Placed:
        """The components where a run puts them.

        Args:
            config: of the run.
            models: the transformers, with weights or without; `vae-aware` looks at their sizes.

        Raises:
            ConfigError, PartitionError: a run refuses the configuration.
        """
        places = choose_places(config, self.sizes, models, self._plan, {})
        layout = layout_of(config)
        computing = {name: places.computing(name, layout) for name in self.sizes}
        holders = {**{name: set(ranks) for name, ranks in computing.items()}, **places.holders(layout)}
        number = {name: len(places.teams[name].compute) if name in places.teams else 1 for name in self.sizes}
        decode_seconds, decode_bytes = self.decode(number.get("vae", 1))

        def weights(rank: int, kind: str) -> int:
            own = [name for name, size in self.sizes.items() if size.kind == kind and rank in holders[name]]
            return sum(self.held[name] // (number[name] if name in places.texts else 1) for name in own)

        def call(name: str, seconds: float) -> ComponentCall:
            return ComponentCall(seconds, computing[name] if name in places.owners else None)

        return Placed(
            places,
            held=tuple(
                HeldBeside(
                    weights(rank, "encoder"),
                    weights(rank, "decoder"),
                    decode_bytes * (rank in computing.get("vae", ())),
                )
                for rank in range(config.line_size)
            ),
            encodes=tuple(
                call(name, self._encode_seconds(name, number[name]))
                for name, size in self.sizes.items()
                if size.kind == "encoder"
            ),
            decodes=(call("vae", decode_seconds),) if "vae" in self.sizes else (),
        )

    def _plan(self, name: str, parts: int) -> TextPlan:
        return self.encoders[name].plan(parts)

    def _encode_seconds(self, name: str, parts: int) -> float:
        if parts == 1:
            return self.seconds[name]
        assert self.link is not None  # a component that has a plan has been described in full
        sums = self.encoders[name].sums_seconds(parts, self.tokens, self.itemsize, self.link)
        return self.seconds[name] / parts + sums


def components_of(
    known: Beside,
    size: Size | None,
    itemsize: int,
    device: DeviceProfile,
    measured: MeasuredProfile | None = None,
    topology: str = "auto",
) -> Components:
    """Bytes and seconds of a model's components.

    Seconds that were not measured come from counted operations: arithmetic and memory traffic one after the other, at the
    shares of the device's peak rates that `DeviceProfile` assumes.

    Args:
        known: of the components.
        size: of what is generated; None: not known, then decoding is left out.
        itemsize: bytes of an element of the weights.
        device: that runs them.
        measured: seconds that were measured, where they were.
        topology: of the links between devices.
    """
    rate, bandwidth = device.usable_flops_per_second(itemsize), device.usable_memory_bytes_per_second
    encoders = {own.name: own.parameters * itemsize + own.stored_bytes for own in known.encoders}
    held = encoders | {name: parameters * itemsize for name, parameters in known.decoders.items()}
    seconds = {
        own.name: max(2 * own.parameters * known.tokens / rate, held[own.name] / bandwidth) for own in known.encoders
    }
    if measured is not None and measured.text_encode_seconds:
        seconds = {name: measured.text_encode_seconds * own / sum(encoders.values()) for name, own in encoders.items()}
    decode, peak = 0.0, 0
    if size is not None and known.decode is not None:
        work, pixels, wider = known.decode, size.height * size.width * size.frames, itemsize / HALF_PRECISION_BYTES
        scale = pixels / work.pixels
        decode = scale * (work.flops / rate + work.bytes * wider / bandwidth)
        peak = round(work.peak_bytes * wider * scale)
        if measured is not None:
            decode = measured.vae_seconds(pixels)[1] or decode
    sizes = known.sizes
    if not all(size.bytes for size in sizes.values()):
        sizes = {name: replace(size, bytes=held[name]) for name, size in sizes.items()}
    return Components(
        sizes=sizes,
        held=held,
        seconds=seconds | {"vae": decode},
        decode_bytes=peak,
        encoders={own.name: own for own in known.encoders},
        tokens=known.tokens,
        itemsize=itemsize,
        link=device.link(topology),
    )


def with_tiles(
    components: Components, known: Beside, model: ModelSpec, size: Size | None, dtype: torch.dtype
) -> Components:
    """Components whose VAE's tiles are known, as far as they can be.

    Args:
        components: of the model.
        known: of them.
        model: whose VAE is looked at.
        size: of what is generated.
        dtype: of the weights.
    """
    if size is None or known.vae is None or known.decode is None or not tells_tiles(known.vae):
        return components
    vae = build_vae(model, dtype)
    assert vae is not None
    latents = latents_of(vae, known.vae, size)
    return replace(components, latents=math.prod(latents), tiles=tile_sizes(vae, latents))
