"""A pipeline case: one diffusers pipeline, tiny, with random weights, and a call of it."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from torch import nn

from dit_pipelining.capture.structure import tensors_in
from tests.zoo.case import Case, build_model, patch_mask_compilation, patch_torchvision_resize, with_noise

STEPS = 2
"""Denoising steps of a call that says nothing else: the second one uses what the first one left."""


@dataclass(frozen=True)
class PipelineCase:
    """A pipeline class of diffusers with its components and the arguments of one call.

    Args:
        pipeline_class: its name in `diffusers`.
        parts: makes the components and other arguments of the class; it is called after the random state is seeded.
        call: arguments of the pipeline. A value that is a function is called, so that each call gets inputs of its own.
        variant: told apart from other cases of the class by this name.
        cut: whether a call has several samples, or both branches of guidance in a batch, so that replicas share it. The
            last bits may then differ, since kernels sum in another order for another batch size. A batch of two that
            cannot be told from two frames or two pictures stays whole.
        prepare: called with the pipeline that was built, for what a user would switch on.
        steps: denoising steps, where the pipeline takes them.
        tolerance: of a cut batch, absolute and relative, after all steps.
    """

    pipeline_class: str
    parts: Callable[[], Mapping[str, Any]] = field(repr=False)
    call: Mapping[str, Any] = field(repr=False)
    variant: str = ""
    cut: bool = False
    prepare: Callable[[Any], object] | None = None
    steps: int = STEPS
    tolerance: float = 1e-3

    @property
    def name(self) -> str:
        return f"{self.pipeline_class}@{self.variant}" if self.variant else self.pipeline_class


def build_pipeline(case: PipelineCase, seed: int = 0) -> Any:
    """The pipeline on the CPU in float32; the same for the same seed."""
    patch_torchvision_resize()
    patch_mask_compilation()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with with_noise() as models:
            parts = dict(case.parts())
            models.extend(part for part in parts.values() if isinstance(part, nn.Module))
        pipeline = getattr(diffusers, case.pipeline_class)(**parts)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.eval().requires_grad_(False)
    if case.prepare is not None:
        case.prepare(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def call_pipeline(case: PipelineCase, pipeline: Any, seed: int = 7) -> list[torch.Tensor]:
    """Everything one call gives: the latents after each step if they can be had, then what the pipeline returns."""
    latents: list[Any] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)  # some pipelines draw without the generator
        result = pipeline(**arguments(case, pipeline, seed, latents))
    return outputs_of([latents, result])


def arguments(case: PipelineCase, pipeline: Any, seed: int, latents: list[Any] | None = None) -> dict[str, Any]:
    """The arguments of one call, made anew. A callback puts each step's latents into the list, if one is given."""
    accepted = inspect.signature(type(pipeline).__call__).parameters
    call: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "num_inference_steps": case.steps}
    call |= {"output_type": "np", **case.call}
    made = {name: value() if inspect.isfunction(value) else value for name, value in call.items()}

    def keep(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        assert latents is not None
        latents.extend(values.values())
        return values

    if latents is not None:
        made["callback_on_step_end"] = keep
    return {name: value for name, value in made.items() if name in accepted or name in case.call}


def outputs_of(results: Any) -> list[torch.Tensor]:
    """All tensors, arrays and pictures in results, as tensors of their own."""
    return [torch.as_tensor(tensor).clone() for tensor in tensors_in(_as_tensors(results))]


def _as_tensors(value: Any) -> Any:
    """Arrays and pictures as tensors, so that they can be compared."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Image.Image):
        return torch.from_numpy(np.array(value))
    if isinstance(value, Mapping):
        return {name: _as_tensors(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_tensors(item) for item in value]
    return value


def dit(model_class: str, init: Mapping[str, Any], **changes: Any) -> nn.Module:
    """A transformer of the zoo's configuration, with changes."""
    seed = int(torch.randint(2**31, ()))
    return build_model(Case(model_class, model_class, {**init, **changes}, {}), seed)


def small_area(pipeline: Any) -> None:
    """Let a pipeline that scales given pictures to a fixed area make them 32 x 32."""
    module: Any = sys.modules[type(pipeline).__module__]
    values = len(module.calculate_dimensions(1024, 1.0))  # width and height, and in some pipelines a third one
    module.calculate_dimensions = lambda area, ratio: (32, 32, None)[:values]


def picture(width: int = 32, height: int = 32, seed: int = 0) -> Callable[[], Image.Image]:
    """Makes an image of random pixels."""
    return lambda: _picture(width, height, seed)


def pictures(count: int, width: int = 32, height: int = 32) -> Callable[[], list[Image.Image]]:
    """Makes a video of random pixels, as a list of images."""
    return lambda: [_picture(width, height, seed) for seed in range(count)]


def mask(width: int = 32, height: int = 32) -> Callable[[], Image.Image]:
    """Makes a mask whose right half is to be painted."""

    def make() -> Image.Image:
        pixels = np.zeros((height, width), dtype=np.uint8)
        pixels[:, width // 2 :] = 255
        return Image.fromarray(pixels)

    return make


def _picture(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
