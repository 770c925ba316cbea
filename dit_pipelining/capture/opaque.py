"""Modules that are recorded as one call, since their inner state is their own affair."""

from collections.abc import Iterator

from torch import nn

OPAQUE_PACKAGES = ("torch.nn.", "torch.ao.", "torchao.", "peft.", "bitsandbytes.", "diffusers.quantizers.")
"""Where the classes of such modules are from, if they have parameters."""

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_opaque(module: nn.Module) -> bool:
    """Whether every call of the module is recorded as one."""
    path = type(module).__module__ + "."
    if isinstance(module, CONTAINERS) or not path.startswith(OPAQUE_PACKAGES):
        return False
    return _has_tensors(module)


def _has_tensors(module: nn.Module) -> bool:
    """Whether the module has parameters or buffers, itself or within. Asked at every call of a model: without generators."""
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None:
                return True
    return any(child is not None and _has_tensors(child) for child in module._modules.values())


def weights_within(name: str, module: nn.Module) -> Iterator[str]:
    """Names of what a module computes with, as they are recorded: opaque modules, and the tensors beside them."""
    if is_opaque(module):
        yield name
        return
    yield from (f"{name}.{key}" for key in (*module._parameters, *module._buffers) if getattr(module, key) is not None)
    for key, child in module._modules.items():
        if child is not None:
            yield from weights_within(f"{name}.{key}", child)
