"""What stands beside the transformers: encoders and the VAE, their bytes and seconds."""

import math
from dataclasses import dataclass

from dit_pipelining.costs.devices import DeviceProfile
from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.planning.presets import Preset
from dit_pipelining.planning.recipes import Size
from dit_pipelining.sharding.tile_ranks import assign_tiles
from partitioners import Component

HALF_PRECISION_BYTES = 2


@dataclass(frozen=True)
class Components:
    """The components of a pipeline beside its transformers.

    Attributes:
        encoder_bytes, vae_bytes: of their weights.
        decode_bytes: of the VAE's activations at their fullest, while it decodes without tiling.
        encode_seconds: of the text encoders, for one request.
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

    def for_partitioner(self, calls: int) -> tuple[Component, ...]:
        """Encoders on the first rank and the VAE on the last, unless they are better elsewhere.

        Args:
            calls: of the transformer in one request, over which the seconds are spread.
        """
        found = (
            Component("text_encoder", self.encode_seconds / calls, self.encoder_bytes, preferred_rank=0),
            Component("vae", self.decode_seconds / calls, self.vae_bytes + self.decode_bytes, preferred_rank=-1),
        )
        return tuple(component for component in found if component.bytes or component.seconds)


def components_of(
    known: Preset, size: Size, itemsize: int, device: DeviceProfile, measured: MeasuredProfile | None
) -> Components:
    """Bytes and seconds of a known model's components.

    Seconds that were not measured come from counted operations: arithmetic and memory traffic one after the other, at the
    shares of the device's peak rates that `DeviceProfile` assumes.

    Args:
        known: the model.
        size: of what is generated.
        itemsize: bytes of an element of the weights.
        device: that runs them.
        measured: seconds that were measured, where they were.
    """
    half = itemsize <= HALF_PRECISION_BYTES
    peak = device.bfloat16_flops_per_second if half else device.float32_flops_per_second
    rate = peak * device.matrix_share
    bandwidth = device.memory_bytes_per_second * device.memory_share
    defaults = (known.defaults["height"], known.defaults["width"], known.defaults["frames"])
    pixels = size.height * size.width * size.frames
    scale = pixels / math.prod(defaults)
    work = known.vae["decode"]
    encoders = sum(encoder["parameters"] for encoder in known.text_encoders)
    prompts = known.guidance["calls_per_step"] * known.guidance["batch_per_call"]
    tokens = known.text.get("seq_len", 0) * prompts
    decode = scale * (work["flops"] / rate + work["bytes"] * itemsize / HALF_PRECISION_BYTES / bandwidth)
    encode = max(2 * encoders * tokens / rate, encoders * itemsize / bandwidth)
    if measured is not None:
        decode = measured.vae_seconds(pixels)[1] or decode
        encode = measured.text_encode_seconds or encode
    return Components(
        encoder_bytes=encoders * itemsize,
        vae_bytes=known.vae["parameters"] * itemsize,
        decode_bytes=round(work["peak_bytes"] * itemsize / HALF_PRECISION_BYTES * scale),
        encode_seconds=encode,
        decode_seconds=decode,
    )
