"""What a model, a spec and a picture's size must be for a stream; asked before anything is made."""

import math
import warnings
from typing import Any

from diffusers import WanTransformer3DModel
from torch import nn

from dit_pipelining.errors import ConfigError, InputError
from dit_pipelining.stream.spec import StreamSpec


def latent_shape(pipeline: Any, spec: StreamSpec, height: int, width: int) -> tuple[int, ...]:
    """Of the latents of a chunk: (1, channels, frames, height, width).

    Raises:
        InputError: the VAE or the model's patches do not divide the pixels.
    """
    config, factor = pipeline.transformer.config, pipeline.vae_scale_factor_spatial
    pixels = {"height": height, "width": width}
    for (name, size), patch in zip(pixels.items(), config.patch_size[1:], strict=True):
        step = factor * patch
        if size % step:
            nearest = max(step, round(size / step) * step)
            raise InputError(
                f"{name}={size}: the VAE and the model's patches need a multiple of {step}; use {nearest}."
            )
    return (1, config.in_channels, spec.frames_per_chunk, height // factor, width // factor)


def check_span(model: Any, spec: StreamSpec) -> None:
    """Check that no two frames that see each other are farther apart than the model's rotary table.

    Raises:
        ConfigError: they are.
    """
    span, table = spec.sinks + spec.window + spec.frames_per_chunk, model.config.rope_max_seq_len
    if span > table:
        raise ConfigError(
            f"sinks={spec.sinks}, window={spec.window} and frames_per_chunk={spec.frames_per_chunk} span {span} latent "
            f"frames; the model knows distances up to {table}."
        )


def warn_of_idle_stages(spec: StreamSpec, num_stages: int) -> None:
    """Say so where stages will wait for each other: a stream that sees finished chunks has one pass in flight at a time."""
    if spec.policy == "level" or spec.streams >= num_stages:
        return
    warnings.warn(
        f"policy={spec.policy!r}: a chunk starts when the one before is finished, so {spec.streams} of {num_stages} stages "
        f'work at a time. Use streams={num_stages} or more, or policy="level", with which one stream fills them.',
        stacklevel=3,
    )


def check_rate(adaptive_fps: float) -> None:
    """Check a frame rate.

    Raises:
        ConfigError: it is none.
    """
    is_number = isinstance(adaptive_fps, int | float) and not isinstance(adaptive_fps, bool)
    if not is_number or not 0 < adaptive_fps < math.inf:
        raise ConfigError(f"adaptive_fps={adaptive_fps!r}: expected frames per second, above 0.")


def check_model(model: nn.Module) -> None:
    """Check that a model can be made causal.

    Raises:
        InputError: says what does not fit.
    """
    if not isinstance(model, WanTransformer3DModel):
        raise InputError(
            f"{type(model).__name__} cannot stream yet: only WanTransformer3DModel has a causal attention with rolling keys "
            "and values (dit_pipelining/stream/attention.py)."
        )
    config: Any = model.config
    if config.added_kv_proj_dim is not None:
        raise InputError("this Wan takes image embeddings; streams are made from text and video only.")
    if config.in_channels != config.out_channels or config.patch_size[0] != 1:
        raise InputError(
            f"this Wan takes {config.in_channels} channels in patches of {config.patch_size[0]} frames and gives "
            f"{config.out_channels} channels; a stream needs as many on both sides, frame by frame."
        )
