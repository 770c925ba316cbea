"""Forward hooks of torch that a caller has put on modules of a model.

[Note: hooks of modules]
A hook sees each call of its module, on the rank that runs it, and may change what the module is given or gives. Blocks, and
what is inside of them, are called at every run of a stage, so their hooks act by themselves. Glue is replayed operation by
operation, or computed once for many steps; so a module of the glue that has a hook is recorded as one call, and runs at
every call of the model. A forward is recorded without hooks: they would see tensors without data. Hooks on all modules at
once would make every module of the glue such a call, to be seen by each rank that computes its results; they are refused.
"""

import functools
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dit_pipelining.errors import ConfigError
from dit_pipelining.torch_internals import GLOBAL_FORWARD_HOOKS

KINDS = ("_forward_pre_hooks", "_forward_hooks")

PARTS_OF_MODULES = ("torch.", "dit_pipelining.")
"""Whose hooks are parts of the module that they are on: weight normalisation, sharding."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a caller has put forward hooks on the module."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return False
    return any(_is_callers(hook) for kind in KINDS for hook in getattr(module, kind).values())


def glue_modules(model: nn.Module, blocks: Container[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, itself included, by name, but for those of these names and what is in them."""
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        name, module = pending.pop()
        yield name, module
        for key, child in module._modules.items():
            path = f"{name}.{key}" if name else key
            if child is not None and path not in blocks:
                pending.append((path, child))


def hooked_within(module: nn.Module) -> bool:
    """Whether a hook is on the module or on one inside of it."""
    return any(map(has_hooks, module.modules()))


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Call the modules of a model without the caller's hooks meanwhile."""
    before = []
    try:
        for module in model.modules():
            for kind in KINDS:
                hooks = getattr(module, kind)
                if hooks:
                    before.append((vars(module), kind, hooks))
                    vars(module)[kind] = type(hooks)((key, own) for key, own in hooks.items() if not _is_callers(own))
        yield
    finally:
        for attributes, kind, hooks in before:
            attributes[kind] = hooks


def refuse_hooked(model: nn.Module, handing: Iterable[str]) -> None:
    """Refuse hooks on blocks that give an argument back as it is: a graph passes it around them, whatever a hook makes of it.

    Raises:
        ConfigError: names the block.
    """
    for name in handing:
        if has_hooks(model.get_submodule(name)):
            raise ConfigError(
                f"the block {name!r} of {type(model).__name__} has a forward hook, but gives an argument back as it is, which "
                "stages pass around it. Put the hook on what is inside of the block."
            )


def refuse_global_hooks() -> None:
    """Refuse forward hooks on all modules at once, but for torch's own (`FlopCounterMode`); cheap enough for every call.

    Raises:
        ConfigError: names the hook.
    """
    for hooks in GLOBAL_FORWARD_HOOKS:
        for hook in hooks.values() if hooks else ():
            if _is_callers(hook):
                raise ConfigError(
                    f"{hook!r} is a forward hook on all modules at once (register_module_forward_hook or ..._pre_hook). A "
                    "split model runs what lies between its blocks operation by operation, so the hook would see other calls "
                    "than with the whole model. Remove it, and put hooks on the modules that matter with register_forward_hook."
                )


def refuse_compiled(model: nn.Module, name: str) -> None:
    """Refuse hooks within a transformer whose blocks are compiled: what is compiled does not notice them.

    Raises:
        ConfigError: names the module.
    """
    for path, module in model.named_modules():
        if path and has_hooks(module):
            raise ConfigError(
                f"{path!r} of the transformer {name!r} has a forward hook, which compiled blocks may run without. Leave "
                "`compile` out of ParallelConfig, or remove the hook."
            )


def _is_callers(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{module}.".startswith(PARTS_OF_MODULES)
