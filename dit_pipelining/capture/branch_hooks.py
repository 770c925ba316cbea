"""Hooks that are on a model's blocks in one branch of guidance only: layers that are skipped, attention that is perturbed.

[Note: hooks of a branch]
Guiders of diffusers put hooks on the model before they call it for such a branch, and take them off after it. Calls of a split
model are in flight by then, so hooks on its modules would act on the wrong calls. Instead they are part of the call: a
capture is for one set of hooks, and whoever runs it puts them on while it does so.
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from diffusers.hooks import HookRegistry, layer_skip, smoothed_energy_guidance_utils
from torch import nn

from dit_pipelining.errors import ConfigError

REPEATABLE = (
    layer_skip.AttentionProcessorSkipHook,
    layer_skip.FeedForwardSkipHook,
    layer_skip.TransformerBlockSkipHook,
    smoothed_energy_guidance_utils.SmoothedEnergyGuidanceHook,
)
"""Kinds of hooks that do the same at every call."""

OF_THE_MODULE = ("fn_ref", "_metadata")
"""What a hook notes about the module that it is on."""


@dataclass(frozen=True)
class BranchHook:
    """A hook of diffusers, apart from the module that it is on.

    Attributes:
        module: name of that module.
        kind: class of the hook.
        options: its attributes.
    """

    module: str
    kind: type
    options: tuple[tuple[str, Hashable], ...]

    def make(self) -> Any:
        hook: Any = object.__new__(self.kind)
        vars(hook).update(self.options)
        return hook


_asked: ContextVar[dict[int, tuple[BranchHook, ...]]] = ContextVar("hooks of the branch")


def ask_hooks(model: nn.Module, hooks: tuple[BranchHook, ...]) -> None:
    """Have calls of a model run with these hooks from now on, in this thread."""
    _asked.set({**_asked.get({}), id(model): hooks})


def forget_hooks() -> None:
    """Have calls run without hooks again: an error may have come between a guider's asking for them and its taking back."""
    _asked.set({})


def asked_hooks(model: nn.Module) -> tuple[BranchHook, ...]:
    """The hooks that a call of the model runs with."""
    return _asked.get({}).get(id(model), ())


def read_hooks(model: nn.Module) -> tuple[BranchHook, ...]:
    """The hooks that are on a model.

    Raises:
        ConfigError: one of them does something else at each call.
    """
    found = []
    for name, module in model.named_modules():
        registry = vars(module).get("_diffusers_hook")
        for hook in getattr(registry, "hooks", {}).values():
            _check_repeatable(hook, name)
            options = {key: value for key, value in vars(hook).items() if key not in OF_THE_MODULE}
            found.append(BranchHook(name, type(hook), tuple(sorted(options.items()))))
    return tuple(found)


@contextmanager
def hooked(model: nn.Module, hooks: Iterable[BranchHook]) -> Iterator[None]:
    """Put hooks on a model meanwhile."""
    before = []
    try:
        for hook in hooks:
            module = model.get_submodule(hook.module)
            before.append((vars(module), vars(module).get("forward")))
            HookRegistry(module).register_hook(hook.make(), "branch")
        yield
    finally:
        for attributes, forward in reversed(before):
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


def _check_repeatable(hook: Any, module: str) -> None:
    if type(hook) not in REPEATABLE:
        raise ConfigError(
            f"the guider puts a {type(hook).__name__} on {module!r}, which is not known to do the same at every call; on a "
            f"split model only {', '.join(kind.__name__ for kind in REPEATABLE)} are."
        )
    if getattr(hook, "dropout", 1.0) != 1.0:
        raise ConfigError(
            f"the guider drops what {module!r} gives with a chance of {hook.dropout}; the ranks of a split model would draw "
            "other numbers than one process. Use dropout=1.0, which skips the layer."
        )
