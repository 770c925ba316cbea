"""What guidance makes of a denoising step: how many transformer calls, each of how many samples."""

import math
from dataclasses import dataclass

from dit_pipelining.planning.presets import Preset

GUIDANCE_MODES = {"none": (1, 1), "two-calls": (2, 1), "batched": (1, 2)}
"""Calls per step and samples per call: no guidance (or guidance that is an input of the model), one call per branch, or one
call with both branches in its batch."""


@dataclass(frozen=True)
class StepCalls:
    """The calls of one denoising step of one request.

    Attributes:
        calls: that do not wait for each other.
        batch: samples in each.
    """

    calls: int
    batch: int


def step_calls(mode: str | None, known: Preset | None, batch: int | None, replicas: int) -> StepCalls:
    """The calls of a step as the runtime makes them.

    Args:
        mode: of `GUIDANCE_MODES`; None: as the model's pipeline does it, or no guidance where that is not known.
        known: what is known about the model.
        batch: samples in one call of the pipeline; None: as guidance needs it for one image or video.
        replicas: over which a batch is cut, as far as it divides.
    """
    if mode is not None:
        calls, samples = GUIDANCE_MODES[mode]
    elif known is not None:
        calls, samples = known.guidance["calls_per_step"], known.guidance["batch_per_call"]
    else:
        calls, samples = GUIDANCE_MODES["none"]
    samples = batch or samples
    parts = math.gcd(samples, replicas)
    return StepCalls(calls * parts, samples // parts)
