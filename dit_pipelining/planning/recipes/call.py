"""The size of a result in pixels, and what one transformer call for it looks like in latents and tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dit_pipelining.errors import InputError
from dit_pipelining.planning.inputs import Description

Config = Mapping[str, Any]
Patch = tuple[int, int, int]


@dataclass(frozen=True)
class Size:
    """What is generated.

    Attributes:
        height, width: in pixels.
        frames: of the video; 1 for an image.
        batch: samples in one transformer call.
    """

    height: int
    width: int
    frames: int
    batch: int = 1

    def __str__(self) -> str:
        frames = f", {self.frames} frames" if self.frames > 1 else ""
        return f"{self.width}x{self.height}{frames}, batch {self.batch}"


@dataclass(frozen=True)
class Call:
    """One transformer call.

    Attributes:
        config: of the transformer, with the defaults of its class.
        batch: samples.
        frames, height, width: of the latents.
        patch: latents per token in time, height and width.
        text: the prompt's `seq_len` and the like, as in `Preset.text`.
        pixels: pixels per latent in height and width.
        pixel_frames: frames per latent.
        expand_timesteps: whether every token has a timestep of its own.
    """

    config: Config
    batch: int
    frames: int
    height: int
    width: int
    patch: Patch
    text: Mapping[str, Any]
    pixels: int
    pixel_frames: int
    expand_timesteps: bool = False

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens in time, height and width."""
        return self.frames // self.patch[0], self.height // self.patch[1], self.width // self.patch[2]

    @property
    def tokens(self) -> int:
        frames, height, width = self.grid
        return frames * height * width

    @property
    def text_tokens(self) -> int:
        return int(self.text["seq_len"])


def config_patch(config: Config) -> Patch:
    """The patch that the transformer itself makes tokens of."""
    size = config["patch_size"]
    if isinstance(size, list | tuple):
        return (size[0], size[1], size[2])
    return config.get("patch_size_t") or 1, size, size


@dataclass(frozen=True)
class Family:
    """Classes that are called alike.

    Attributes:
        inputs: the keyword arguments of a call, described.
        patch: latents per token; pipelines that pack latents before the transformer have a patch that its config lacks.
        sample: names of the config's fields that hold the default height, width (in latents) and frames (of the video).
        limit: the largest number of tokens along one side that the config's position tables allow.
    """

    inputs: Callable[[Call], dict[str, Description]]
    patch: Callable[[Config], Patch] = config_patch
    sample: tuple[str, ...] = ()
    limit: Callable[[Config], int | None] = field(default=lambda config: None)

    def default_size(self, config: Config, vae: Mapping[str, Any], known: Size) -> Size:
        """The config's own size where it has one, else `known`; as small as its position tables need it."""
        sample = [config.get(name) for name in self.sample]
        size = known
        if len(sample) >= 2 and isinstance(sample[0], int) and isinstance(sample[1], int):
            size = replace(size, height=sample[0] * vae["spatial"], width=sample[1] * vae["spatial"])
        if len(sample) == 3 and isinstance(sample[2], int):
            size = replace(size, frames=sample[2])
        patch, limit = self.patch(config), self.limit(config)
        height, width = (
            _fitting(pixels, vae["spatial"] * patch[side], limit)
            for side, pixels in ((1, size.height), (2, size.width))
        )
        frames = size.frames if limit is None else min(size.frames, (limit * patch[0] - 1) * vae["temporal"] + 1)
        return replace(size, height=height, width=width, frames=frames)

    def call(self, config: Config, vae: Mapping[str, Any], size: Size, text: Mapping[str, Any], expand: bool) -> Call:
        """The call that generates something of this size.

        Raises:
            InputError: the height or width is not made of whole tokens, or the model's position tables are too short.
        """
        patch, limit = self.patch(config), self.limit(config)
        for name, side, pixels in (("height", 1, size.height), ("width", 2, size.width)):
            step = vae["spatial"] * patch[side]
            if pixels < step or pixels % step:
                nearest = max(round(pixels / step), 1) * step
                raise InputError(f"{name} {pixels} is not a multiple of {step} pixels; use {nearest}.")
            if limit is not None and pixels > limit * step:
                raise InputError(f"{name} {pixels} is more than this model can do; use at most {limit * step}.")
        frames = -(-((size.frames - 1) // vae["temporal"] + 1) // patch[0]) * patch[0]
        if limit is not None and frames > limit * patch[0]:
            most = (limit * patch[0] - 1) * vae["temporal"] + 1
            raise InputError(f"{size.frames} frames are more than this model can do; use at most {most}.")
        return Call(
            config=config,
            batch=size.batch,
            frames=frames,
            height=size.height // vae["spatial"],
            width=size.width // vae["spatial"],
            patch=patch,
            text=text,
            pixels=vae["spatial"],
            pixel_frames=vae["temporal"],
            expand_timesteps=expand,
        )


def describe_inputs(family: Family, call: Call) -> dict[str, Description]:
    """The keyword arguments of the call, described as `planning.inputs` says.

    Raises:
        InputError: the config lacks a field that they depend on.
    """
    try:
        return family.inputs(call)
    except KeyError as error:
        raise InputError(
            f"the inputs cannot be derived from a config without {error}; describe them in a file."
        ) from None


def _fitting(pixels: int, step: int, limit: int | None) -> int:
    tokens = max(pixels // step, 1)
    return (tokens if limit is None else min(tokens, limit)) * step
