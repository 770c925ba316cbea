"""Transformers without weights: shapes, dtypes and code, which is all that planning needs."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dit_pipelining.errors import ConfigError, NotATransformerError


def transformer_class(name: str) -> type[nn.Module]:
    """The class of diffusers' transformers that has this name.

    Raises:
        NotATransformerError: this diffusers has no such class, or it is no transformer (a VAE, a UNet).
    """
    import diffusers

    found = getattr(diffusers, name, None)
    if not isinstance(found, type):
        raise NotATransformerError(
            f"diffusers {diffusers.__version__} has no class {name!r}; install the release that the model was saved with, "
            "or a newer one."
        )
    if not issubclass(found, nn.Module) or not found.__module__.startswith("diffusers.models.transformers"):
        raise NotATransformerError(
            f"{name} is not a transformer ({found.__module__}); give the pipeline's folder or its transformer's."
        )
    return found


def class_defaults(cls: type[nn.Module]) -> dict[str, Any]:
    """The defaults of the arguments of the class."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def build_weightless(cls: type[nn.Module], config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model whose parameters lie on the meta device and whose buffers are real, in eval mode.

    Args:
        cls: a model class of diffusers.
        config: its arguments; entries that it does not take are left out, as `from_config` leaves them out.
        dtype: of the parameters, but for those that the class keeps in float32, as
            `from_pretrained(torch_dtype=dtype)` does it (`_keep_in_fp32_modules`, compared with whole parts of the name).

    Raises:
        ConfigError: the class does not take these arguments.
    """
    from accelerate import init_empty_weights

    known = inspect.signature(cls.__init__).parameters
    arguments = {name: value for name, value in config.items() if name in known}
    try:
        with init_empty_weights(include_buffers=False):
            model = cls(**arguments)
    except Exception as error:
        raise ConfigError(f"{cls.__name__} cannot be built from its config: {error}") from error
    kept = getattr(cls, "_keep_in_fp32_modules", None) or ()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if {*kept} & {*name.split(".")} else dtype)
    return model.eval().requires_grad_(False)
