"""StreamSpec: how a stream is denoised, and what a chunk may see of earlier ones."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dit_pipelining.config_checks import check_positive
from dit_pipelining.errors import ConfigError

POLICIES = ("level", "clean", "last")

FRAMES_PER_LATENT = 4
"""Frames that a latent stands for in Wan's VAE; the first latent of a stream stands for one. Fixed in diffusers' class."""

TRAIN_TIMESTEPS = 1000
"""Timesteps of flow-matching models, Wan among them, count from 0 to 1000."""


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """How a stream is denoised.

    Args:
        levels: the noise levels (sigma) that a chunk passes, falling, each above 0 and at most 1: x = (1 - sigma) * clean
            + sigma * noise.
        frames_per_chunk: latent frames of a chunk.
        window: latent frames before its own that a chunk sees; whole chunks.
        sinks: latent frames of the stream's beginning that every chunk sees besides; whole chunks.
        policy: whose keys and values a chunk sees. `"level"`: those that earlier chunks had at the same noise level, which
            lets all levels of one stream be in flight (as StreamDiffusionV2 runs them). `"clean"`: those of finished
            chunks, from one more pass at noise level 0 (CausVid, Self-Forcing): a chunk starts when the one before is
            finished, so a pipeline of W stages is full with W streams only. `"last"`: those of the last level.
        streams: videos side by side in one pipeline.
        guidance_scale: above 1, every row has a second one without the prompt (classifier-free guidance).

    Raises:
        ConfigError: a value cannot be used; says which and why.
    """

    levels: tuple[float, ...] = (1.0, 0.9375, 0.8333, 0.625)
    frames_per_chunk: int = 1
    window: int = 6
    sinks: int = 0
    policy: str = "level"
    streams: int = 1
    guidance_scale: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.levels, Iterable):
            raise ConfigError(f"levels={self.levels!r}: expected falling numbers, such as (1.0, 0.6).")
        object.__setattr__(self, "levels", tuple(self.levels))
        check_positive("frames_per_chunk", self.frames_per_chunk)
        check_positive("streams", self.streams)
        if self.policy not in POLICIES:
            raise ConfigError(f"policy={self.policy!r}: expected one of {', '.join(POLICIES)}.")
        numbers = all(isinstance(level, int | float) and 0 < level <= 1 for level in self.levels)
        falling = all(one > other for one, other in zip(self.levels, self.levels[1:], strict=False))
        if not self.levels or not numbers or not falling:
            raise ConfigError(
                f"levels={self.levels!r}: expected falling numbers above 0 and at most 1, such as (1.0, 0.6)."
            )
        for name in ("window", "sinks"):
            frames = getattr(self, name)
            if not isinstance(frames, int) or isinstance(frames, bool) or frames < 0 or frames % self.frames_per_chunk:
                raise ConfigError(
                    f"{name}={frames!r}: expected latent frames that are whole chunks of {self.frames_per_chunk}, 0 or more."
                )
        if not isinstance(self.guidance_scale, int | float) or not 0 <= self.guidance_scale < math.inf:
            raise ConfigError(f"guidance_scale={self.guidance_scale!r}: expected a number of 0 or more.")

    @property
    def num_levels(self) -> int:
        return len(self.levels)

    @property
    def passes(self) -> int:
        """How often a chunk goes through the model."""
        return self.num_levels + (self.policy == "clean")

    @property
    def branches(self) -> int:
        """Rows for each chunk and level: with the prompt, and with guidance without it."""
        return 2 if self.guidance_scale > 1 else 1

    @property
    def max_rows(self) -> int:
        """The most rows that can meet in one tick."""
        return self.streams * self.passes * self.branches

    @cached_property
    def window_chunks(self) -> int:
        return self.window // self.frames_per_chunk

    @cached_property
    def sink_chunks(self) -> int:
        return self.sinks // self.frames_per_chunk

    def sigma(self, level: int, noise_scale: float | None = None) -> float:
        """The noise level of a pass; 0 for the pass over a finished chunk.

        Args:
            level: index of the pass.
            noise_scale: of the chunk: sigma of its first level, where that is not `levels[0]`; the others follow in
                proportion.
        """
        if level == self.num_levels:
            return 0.0
        if noise_scale is None or noise_scale == self.levels[0]:
            return self.levels[level]
        return noise_scale if level == 0 else self.levels[level] * noise_scale / self.levels[0]

    def is_kept(self, level: int) -> bool:
        """Whether later chunks see the keys and values of this pass."""
        return self.policy == "level" or level == self.passes - 1

    def cache_of(self, level: int) -> int:
        """Which of a stream's caches a pass reads and writes."""
        return level if self.policy == "level" else 0

    @property
    def caches(self) -> int:
        """Caches of each stream and branch."""
        return self.num_levels if self.policy == "level" else 1


def fewer_levels(levels: Sequence[float], count: int) -> tuple[float, ...]:
    """`count` of the levels, the first one among them, evenly chosen."""
    return tuple(levels[i * len(levels) // count] for i in range(count))
