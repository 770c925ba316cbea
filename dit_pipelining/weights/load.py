"""Fill one stage's part of a model that was built without weights."""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from dit_pipelining.errors import CheckpointError
from dit_pipelining.sharding.tensor_layers import Shard
from dit_pipelining.weights.checkpoint import Checkpoint
from dit_pipelining.weights.empty import loaded_dtype
from partitioners.errors import counted

MOST_NAMED = 20
"""How many tensors of a kind an error names; it counts them all."""


@dataclass(frozen=True)
class AbsentState:
    """Of a weight in bitsandbytes' 4 bit that has no data here: only the shape of its layer, and nothing to be stored.

    Attributes:
        shape: (out features, in features).
    """

    shape: torch.Size

    def as_dict(self, packed: bool = False) -> dict[str, torch.Tensor]:
        return {}


def name_without_adapter(name: str) -> str:
    """The name a tensor had before an adapter was put around its layer (peft calls that layer `base_layer`)."""
    return name.replace(".base_layer.", ".")


def load_weights(
    model: nn.Module,
    weights: Iterable[str],
    checkpoint: Checkpoint,
    device: torch.device,
    torch_dtype: torch.dtype | None = None,
    given: Container[str] = (),
    shards: Mapping[str, Shard] | None = None,
) -> None:
    """Read the tensors of some modules and parameters into `model`, on `device`.

    Everything else of the model stays as it is. On the CPU tensors are views of the files; on the way to a GPU they take the
    pinned buffers of `staging.py`.

    Args:
        model: built by `empty_model`.
        weights: names of modules (all their tensors), parameters and buffers, as in `StagePlan.weights`.
        checkpoint: of the whole model.
        device: where the tensors go.
        torch_dtype: as given to `empty_model`.
        given: names of tensors that have data already (`Untouched.given`) and are only moved.
        shards: of the tensors of which the model holds a part, which part (`apply_tensor_parallel`).

    Raises:
        CheckpointError: tensors are missing, unexpected, or of another shape; names them.
    """
    shards = shards or {}
    check_tensors(model, checkpoint, given, shards)
    stored = checkpoint.names_for(model)
    wanted = {}
    for name in tensor_names(model, weights):
        if name in given:
            owner, key = owner_and_key(model, name)
            tensor = getattr(owner, key)
            tensor.data = tensor.data.to(device)
        else:
            wanted[stored[name_without_adapter(name)]] = name
    parts = {stored_name: shards[name] for stored_name, name in wanted.items() if name in shards}
    for stored_name, tensor in checkpoint.read(wanted, device, parts):
        _assign(model, wanted[stored_name], tensor, torch_dtype)
    _move_buffers(model, weights, device)


def release_weights(model: nn.Module, kept: Iterable[str]) -> None:
    """Drop the data of all parameters but those of the `kept` modules and parameters."""
    names = set(tensor_names(model, kept))
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name not in names and parameter.device.type != "meta":
            owner, key = owner_and_key(model, name)
            owner._parameters[key] = _without_data(parameter)
            if hasattr(owner, "init_8bit_state"):  # bitsandbytes' layers keep what they have quantised here, too
                vars(owner.state).update(CB=None, SCB=None)


def _without_data(parameter: Any) -> nn.Parameter:
    # Packed tensors say which shape their layer has, as an adapter for it asks: GGUF's by their class, bitsandbytes' in 4 bit
    # by their state.
    state = getattr(parameter, "quant_state", None)
    if state is not None or hasattr(parameter, "quant_shape"):
        if state is not None:
            parameter.quant_state = None  # else what is dropped is written to
        packed: Any = parameter.to("meta")
        if state is not None:
            packed.quant_state = AbsentState(state.shape)
        return cast(nn.Parameter, packed)
    blank = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return nn.Parameter(blank, requires_grad=parameter.requires_grad)


def check_tensors(
    model: nn.Module,
    checkpoint: Checkpoint,
    given: Container[str] = (),
    shards: Mapping[str, Shard] | None = None,
) -> None:
    """Compare names and shapes of the checkpoint's tensors with the model's, whichever stage needs them.

    Only headers are read. Dtypes may differ: tensors are cast as they are loaded.

    Args:
        model: with weights or without.
        checkpoint: of the whole model.
        given: names of tensors that do not come from the checkpoint, whether it has them or not.
        shards: of the tensors of which the model holds a part, which part.

    Raises:
        CheckpointError: lists what is missing, what is unexpected and what has another shape.
    """
    state = model.state_dict()
    whole = {name: shard.shape for name, shard in (shards or {}).items()}
    expected = {
        name_without_adapter(name): whole.get(name, tuple(tensor.shape))
        for name, tensor in state.items()
        if name not in given
    }
    replaced = {name_without_adapter(name) for name in state if name in given}
    present = {name: checkpoint.shapes[stored] for name, stored in checkpoint.names_for(model).items()}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    wrong = {
        "lacks": sorted(expected.keys() - present.keys()),
        "has unexpected": sorted(
            name
            for name in present.keys() - expected.keys() - replaced
            if not any(re.search(pattern, name) for pattern in ignored)
        ),
        "has other shapes for": [
            f"{name} ({_shape(present[name])} instead of {_shape(shape)})"
            for name, shape in sorted(expected.items())
            if present.get(name, shape) != shape
        ],
    }
    told = [f"{kind} {_some(names)}" for kind, names in wrong.items() if names]
    if told:
        raise CheckpointError(
            f"the checkpoint in {checkpoint.folder} does not fit {type(model).__name__}: it {' and '.join(told)}. "
            "Check that config.json and the weights belong together."
        )


def tensor_names(model: nn.Module, weights: Iterable[str]) -> list[str]:
    """The names in the model's state dict that lie in these modules or are these tensors."""
    state = model.state_dict(keep_vars=True)
    prefixes = tuple(f"{name}." for name in weights)
    chosen = set(weights)
    return [name for name in state if name in chosen or name.startswith(prefixes)]


def owner_and_key(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has this module, parameter or buffer, and its name there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _assign(model: nn.Module, name: str, tensor: torch.Tensor, torch_dtype: torch.dtype | None) -> None:
    owner, key = owner_and_key(model, name)
    old: torch.Tensor = getattr(owner, key)
    dtype = loaded_dtype(model, name, old.dtype, torch_dtype)
    # [Note: mapped files] On the CPU the tensor is a view of the mapped file, and stays one, as in diffusers: its pages
    # are shared with other processes, and its alignment is that of the single process. A copy would be aligned better,
    # which makes the CPU's matrix products round differently in the last bit.
    value = tensor.to(dtype)
    if key in owner._parameters:
        owner._parameters[key] = nn.Parameter(value, requires_grad=old.requires_grad and value.is_floating_point())
    else:
        owner._buffers[key] = value


def _move_buffers(model: nn.Module, weights: Iterable[str], device: torch.device) -> None:
    """Buffers that are not in the checkpoint were made on the CPU."""
    for name in weights:
        owner, key = owner_and_key(model, name)
        value = getattr(owner, key)
        if isinstance(value, nn.Module):
            for module in value.modules():
                for own, buffer in module._buffers.items():
                    module._buffers[own] = None if buffer is None else buffer.to(device)
        elif key in owner._buffers:
            owner._buffers[key] = value.to(device)


def move_to(model: nn.Module, name: str, device: torch.device) -> None:
    """Move a module, parameter or buffer of a model to a device."""
    owner, key = owner_and_key(model, name)
    value = getattr(owner, key)
    if isinstance(value, nn.Module):
        value.to(device)
    elif key in owner._buffers:
        owner._buffers[key] = value.to(device)
    else:
        value.data = value.data.to(device)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    return f"{counted(len(names), 'tensor')}: {shown}{', ...' if len(names) > MOST_NAMED else ''}"


def _shape(sizes: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
