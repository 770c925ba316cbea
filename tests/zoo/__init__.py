"""Tiny configurations and inputs of the diffusers DiT classes, for tests."""

from . import (
    audio,
    classic,
    cog,
    cosmos,
    flux,
    hunyuan,
    kandinsky,
    lumina,
    protein,
    qwen,
    sana,
    sd3,
    single_stream,
    video,
    wan,
    wan_relatives,
)
from .case import Case, build_inputs, build_model

__all__ = ["CASES", "COVERED_CLASSES", "FAMILIES", "NOT_COVERED", "Case", "build_inputs", "build_model", "case_names"]

FAMILIES = (
    audio,
    classic,
    cog,
    cosmos,
    flux,
    hunyuan,
    kandinsky,
    lumina,
    protein,
    qwen,
    sana,
    sd3,
    single_stream,
    video,
    wan,
    wan_relatives,
)
"""Modules that hold the cases, one for each family of models."""

CASES: dict[str, Case] = {case.name: case for family in FAMILIES for case in family.CASES}
"""Every case by its name."""

COVERED_CLASSES: frozenset[str] = frozenset(case.model_class for case in CASES.values())
"""Names of the classes that have at least one case."""

NOT_COVERED: dict[str, str] = {}
"""Class name -> why it has no case."""


def case_names() -> list[str]:
    """Names of all cases, in a fixed order: what `pytest.mark.parametrize` takes."""
    return list(CASES)
