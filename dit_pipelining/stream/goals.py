"""StreamGoals: what a stream shall reach, from a configuration file and the environment."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit_pipelining.config_sources import stream_settings
from dit_pipelining.errors import ConfigError
from dit_pipelining.stream.metrics import Reading


@dataclass(frozen=True)
class StreamGoals:
    """The keys of configurations for streaming diffusion that are about the stream.

    Attributes:
        stream_batch_steps: noise levels in flight; None: those of the spec.
        target_fps: frames per second that are wanted.
        max_ttff_ms: milliseconds until the first frame, at most.
        adaptive_steps: fewer levels than `stream_batch_steps`, where the goals ask for it.
    """

    stream_batch_steps: int | None = None
    target_fps: float | None = None
    max_ttff_ms: float | None = None
    adaptive_steps: bool = False

    def missed(self, reading: Reading) -> list[str]:
        """The goals that a stream did not reach, in words."""
        found = []
        if self.target_fps is not None and reading.fps < self.target_fps:
            found.append(f"slo.target_fps={self.target_fps:g} was missed: {reading.fps:.2f} frames/s came")
        first = None if reading.first_frame is None else reading.first_frame * 1e3
        if self.max_ttff_ms is not None and (first is None or first > self.max_ttff_ms):
            after = "none came" if first is None else f"it came after {first:.0f} ms"
            found.append(f"slo.max_ttff_ms={self.max_ttff_ms:g} was missed by the first frame: {after}")
        return found


def load_goals(path: str | Path | None = None, *, environment: Mapping[str, str] = os.environ) -> StreamGoals:
    """Read the goals of a stream.

    Args:
        path: of a YAML file with `stream_batch_steps` and `slo`; None: no file.
        environment: DIFFUSION_STREAM_BATCH_STEPS and others, which beat the file.

    Raises:
        ConfigError: the file cannot be read, or a value cannot be used.
    """
    found: dict[str, Any] = {}
    settings = stream_settings(path, environment=environment)
    for key, (value, told) in settings.items():
        name = key.removeprefix("slo.")
        if name == "adaptive_steps":
            if not isinstance(value, bool):
                raise ConfigError(f"{told}: expected true or false.")
        elif name == "stream_batch_steps":
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{told}: expected a number of noise levels, 1 or more.")
        elif not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{told}: expected a number above 0.")
        found[name] = value
    goals = StreamGoals(**found)
    if goals.adaptive_steps and goals.target_fps is None and goals.max_ttff_ms is None:
        told = settings["slo.adaptive_steps"][1]
        raise ConfigError(f"{told} needs slo.target_fps or slo.max_ttff_ms: something to adapt to.")
    return goals
