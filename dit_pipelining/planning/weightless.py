"""Transformers without weights: shapes, dtypes and code, which is all that planning needs."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dit_pipelining.errors import ConfigError, NotATransformerError
from dit_pipelining.weights.empty import empty_model
from dit_pipelining.weights.pipelines import diffusers_class, is_transformer


def transformer_class(name: str) -> type[nn.Module]:
    """The class of diffusers' transformers that has this name.

    Raises:
        NotATransformerError: this diffusers has no such class, or it is no transformer (a VAE, a UNet).
    """
    found = diffusers_class(name)
    if not is_transformer(found) or not issubclass(found, nn.Module):
        raise NotATransformerError(
            f"{name} is not a transformer ({found.__module__}); give the pipeline's folder or its transformer's."
        )
    return found


def class_defaults(cls: type[nn.Module]) -> dict[str, Any]:
    """The defaults of the arguments of the class."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def build_weightless(cls: type[nn.Module], config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model that a split would load in `dtype`, without its weights (see `empty_model`).

    Args:
        cls: a model class of diffusers.
        config: its arguments.
        dtype: of the weights, but for those that the class keeps in float32.

    Raises:
        ConfigError: the class does not take these arguments.
    """
    try:
        model = empty_model(cls, config, dtype)
    except Exception as error:
        raise ConfigError(f"{cls.__name__} cannot be built from its config: {error}") from error
    return model.requires_grad_(False)
