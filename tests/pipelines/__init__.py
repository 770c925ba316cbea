"""Tiny diffusers pipelines with random weights, for tests that run the unmodified pipeline over ranks."""

from . import flux, image, qwen, video, wan
from .case import PipelineCase

FAMILIES = (flux, image, qwen, video, wan)
"""Modules that hold the cases, one for each family."""

CASES: dict[str, PipelineCase] = {case.name: case for family in FAMILIES for case in family.CASES}
"""Every case by its name."""
