"""Tiny diffusers pipelines with random weights, for tests that run the unmodified pipeline over ranks."""

from . import (
    audio,
    bria,
    cog,
    cosmos,
    flux,
    flux2,
    hunyuan,
    image,
    kandinsky,
    ltx,
    lumina,
    qwen,
    sana,
    sd3,
    single_stream,
    video,
    wan,
    wan_relatives,
)
from .case import PipelineCase

FAMILIES = (
    audio,
    bria,
    cog,
    cosmos,
    flux,
    flux2,
    hunyuan,
    image,
    kandinsky,
    ltx,
    lumina,
    qwen,
    sana,
    sd3,
    single_stream,
    video,
    wan,
    wan_relatives,
)
"""Modules that hold the cases, one for each family."""

CASES: dict[str, PipelineCase] = {case.name: case for family in FAMILIES for case in family.CASES}
"""Every case by its name."""
