"""What stands beside the transformers: encoders and the VAE, their bytes and seconds."""

import math
from dataclasses import dataclass

from dit_pipelining.costs.devices import HALF_PRECISION_BYTES, DeviceProfile
from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.planning.beside import Beside
from dit_pipelining.planning.degrees import Degrees
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.text_encoders import split_encoders, sums_seconds
from dit_pipelining.sharding.tile_ranks import assign_tiles
from partitioners import Component


@dataclass(frozen=True)
class Components:
    """The components of a pipeline beside its transformers.

    Attributes:
        encoder_bytes, vae_bytes: of their weights.
        split_bytes: those of `encoder_bytes` that are split over `encoder_parts` ranks, the first of which has all others.
        decode_bytes: of the VAE's activations at their fullest, while it decodes without tiling.
        encode_seconds: of the text encoders, for one request, on all ranks that have parts.
        decode_seconds: of the VAE, for one request, without tiles.
        latents: number of elements that are decoded.
        tiles: of the VAE's own tiling, their numbers of elements, those side by side that are computed at a time; empty:
            not known.
    """

    encoder_bytes: int = 0
    vae_bytes: int = 0
    decode_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    split_bytes: int = 0
    encoder_parts: int = 1
    latents: int = 0
    tiles: tuple[tuple[int, ...], ...] = ()

    def decode(self, ranks: int) -> tuple[float, int]:
        """Seconds and bytes of activations of a decode on so many ranks; one computes without tiles, more share them."""
        if ranks == 1 or not self.tiles:
            return self.decode_seconds, self.decode_bytes
        loads = 0.0
        for batch in self.tiles:
            owners = assign_tiles(batch, [1.0] * ranks)
            loads += max(
                sum(cost for cost, own in zip(batch, owners, strict=True) if own == rank) for rank in range(ranks)
            )
        largest = max(cost for batch in self.tiles for cost in batch)
        return self.decode_seconds * loads / self.latents, math.ceil(self.decode_bytes * largest / self.latents)

    def encoder_bytes_at(self, place: int) -> int:
        """Bytes of encoders on a rank that comes so many after the first one that has any."""
        if self.encoder_parts == 1:
            return self.encoder_bytes if place == 0 else 0
        part = self.split_bytes // self.encoder_parts if place < self.encoder_parts else 0
        return part + (self.encoder_bytes - self.split_bytes if place == 0 else 0)

    def for_partitioner(self, calls: int, degrees: Degrees) -> tuple[Component, ...]:
        """Encoders on the first rank and the VAE on the last, unless they are better elsewhere; parts stay where they are.

        Args:
            calls: of the transformer in one request, over which the seconds are spread.
            degrees: how many stages a replica has, and how many ranks share each.
        """
        encode = self.encode_seconds / calls
        found = [
            Component("text_encoder", encode, self.encoder_bytes_at(0), preferred_rank=0)
            if self.encoder_parts == 1
            else Component("text_encoder", encode, self.encoder_bytes_at(0), rank=0),
            Component("vae", self.decode_seconds / calls, self.vae_bytes + self.decode_bytes, preferred_rank=-1),
        ]
        found += [
            Component(f"text_encoder, stage {stage}", encode, held, rank=stage)
            for stage in range(1, degrees.pipeline)
            if self.encoder_parts > 1 and (held := self.encoder_bytes_at(stage * degrees.inside))
        ]
        return tuple(component for component in found if component.bytes or component.seconds)


def components_of(
    known: Beside,
    size: Size | None,
    itemsize: int,
    device: DeviceProfile,
    measured: MeasuredProfile | None,
    *,
    encoder_parts: int = 1,
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
        encoder_parts: ranks over which text encoders are split, `text_encoder_tp_size`.
        topology: of the links between them.

    Raises:
        ConfigError: a text encoder cannot be split like that.
    """
    rate, bandwidth = device.usable_flops_per_second(itemsize), device.usable_memory_bytes_per_second
    parameters = sum(encoder.parameters for encoder in known.encoders)
    held = parameters * itemsize + sum(encoder.stored_bytes for encoder in known.encoders)
    encode = max(2 * parameters * known.tokens / rate, held / bandwidth)
    decode, peak = 0.0, 0
    if size is not None and known.decode is not None:
        work, pixels, wider = known.decode, size.height * size.width * size.frames, itemsize / HALF_PRECISION_BYTES
        scale = pixels / work.pixels
        decode = scale * (work.flops / rate + work.bytes * wider / bandwidth)
        peak = round(work.peak_bytes * wider * scale)
        if measured is not None:
            decode = measured.vae_seconds(pixels)[1] or decode
    if measured is not None:
        encode = measured.text_encode_seconds or encode
    split = 0
    if encoder_parts > 1:
        in_parts = split_encoders(known.name, known.encoders, encoder_parts)
        split = sum(encoder.parameters for encoder in in_parts) * itemsize
        encode *= (split / encoder_parts + held - split) / held
        encode += sums_seconds(in_parts, encoder_parts, known.tokens, itemsize, device.link(topology))
    return Components(
        encoder_bytes=held,
        vae_bytes=known.vae_parameters * itemsize,
        decode_bytes=peak,
        encode_seconds=encode,
        decode_seconds=decode,
        split_bytes=split,
        encoder_parts=encoder_parts,
    )
