"""Models without weights: parameters on the meta device, buffers real."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from dit_pipelining.errors import NotATransformerError


def empty_model(cls: type, config: Mapping[str, Any], torch_dtype: torch.dtype | None = None) -> nn.Module:
    """A diffusers model as `from_pretrained` would load it, but without its weights.

    Buffers and tensors that are plain attributes (rotary tables) are real, as they are no weights; parameters have the
    dtypes that they will have when loaded.

    Args:
        cls: the model's class.
        config: what `cls.load_config` returns, or the arguments of its constructor.
        torch_dtype: dtype of the weights; default float32, as in diffusers.

    Raises:
        NotATransformerError: the class cannot be built from a configuration.
    """
    if not hasattr(cls, "from_config"):
        raise NotATransformerError(f"{cls.__name__} is no diffusers model: it cannot be built from a configuration.")
    with init_empty_weights(include_buffers=False), _default_dtype(torch_dtype or torch.float32):
        model: nn.Module = cls.from_config(config)
    for name, parameter in model.named_parameters():
        wanted = loaded_dtype(model, name, parameter.dtype, torch_dtype)
        if parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)
    return model.eval()


def empty_copy(model: nn.Module) -> nn.Module:
    """A copy of a model without its weights; its buffers are the model's own."""
    known: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for own in model.parameters():
        known[id(own)] = nn.Parameter(torch.empty_like(own, device="meta"), requires_grad=own.requires_grad)
    return deepcopy(model, known)


def loaded_dtype(model: nn.Module, name: str, own: torch.dtype, torch_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor of the checkpoint gets: diffusers' rule in `load_model_dict_into_meta`.

    Args:
        model: may name modules to keep in float32 (`_keep_in_fp32_modules`).
        name: of the parameter or buffer.
        own: the dtype it has in the model.
        torch_dtype: what the user asked for; None: the model's own dtypes.
    """
    if torch_dtype is None or not own.is_floating_point:
        return own
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    return torch.float32 if any(part in kept for part in name.split(".")) else torch_dtype


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Diffusers builds models with the wanted dtype as default, which buffers made in `__init__` inherit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
