"""The hooks that diffusers has put on a module."""

from collections.abc import Mapping
from typing import Any

from torch import nn

REGISTRY = "_diffusers_hook"
"""The attribute in which diffusers keeps them."""


def registry_of(module: nn.Module) -> Any:
    """What holds the hooks on a module; None where it has never had any."""
    return vars(module).get(REGISTRY)


def hooks_of(module: nn.Module) -> Mapping[str, Any]:
    """The hooks on a module, by the names that they were registered under."""
    return getattr(registry_of(module), "hooks", {})
