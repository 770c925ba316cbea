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

from torch import nn

from dit_pipelining.diffusers_hooks import hooks_of, registry_of

OF_THE_MODULE = ("fn_ref", "_metadata")
"""What a hook notes about the module that it is on."""


@dataclass(frozen=True)
class BranchHook:
    """A hook of diffusers, apart from the module that it is on.

    Attributes:
        module: name of that module.
        kind: class of the hook.
        options: its attributes.
        registry: class that puts hooks on a module.
    """

    module: str
    kind: type
    options: tuple[tuple[str, Hashable], ...]
    registry: Any

    def put_on(self, module: nn.Module) -> None:
        hook: Any = object.__new__(self.kind)
        vars(hook).update(self.options)
        self.registry(module).register_hook(hook, "branch")


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
    """The hooks that are on a model."""
    found = []
    for name, module in model.named_modules():
        for hook in hooks_of(module).values():
            options = {key: value for key, value in vars(hook).items() if key not in OF_THE_MODULE}
            found.append(BranchHook(name, type(hook), tuple(sorted(options.items())), type(registry_of(module))))
    return tuple(found)


@contextmanager
def hooked(model: nn.Module, hooks: Iterable[BranchHook]) -> Iterator[None]:
    """Put hooks on a model meanwhile."""
    before = []
    try:
        for hook in hooks:
            module = model.get_submodule(hook.module)
            before.append((vars(module), vars(module).get("forward")))
            hook.put_on(module)
        yield
    finally:
        for attributes, forward in reversed(before):
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward
