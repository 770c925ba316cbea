"""Recipes: the inputs that a pipeline passes to a transformer of some class, from its config and the size of the result."""

from dit_pipelining.planning.recipes.call import Call, Family, Size, describe_inputs
from dit_pipelining.planning.recipes.image import IMAGE_FAMILIES
from dit_pipelining.planning.recipes.video import VIDEO_FAMILIES

__all__ = ["FAMILIES", "Call", "Family", "Size", "describe_inputs"]

FAMILIES: dict[str, Family] = {**IMAGE_FAMILIES, **VIDEO_FAMILIES}
"""By the class of the transformer."""
