"""Caches that each module keeps for itself and that go by the number of the step: TaylorSeer of diffusers.

[Note: caches over stages]
Whether a module of a block computes or predicts depends on how many steps it has seen, on nothing that another rank holds. So
the hooks stay on the modules, and each rank runs those of its stage. A forward is recorded without them: what a module
gives has the same shape either way. Every call has to find the states of its own request and branch (`cache_context`):
several are on their way at a time, and run later than they were made; see runtime/step_states.py.

Caches that compare what the first block gives, that hand what the last block gave to the first one, or that keep one state
for all branches are refused (hooks.py).
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from dit_pipelining.capture.structure import copies_of_given
from dit_pipelining.diffusers_hooks import hooks_of

CONFIGS = ("TaylorSeerCacheConfig",)
"""Configurations of such caches, by the name that their class has in diffusers."""

HOOKS = ("TaylorSeerCacheHook",)
"""And their hooks."""


_known: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[str, Any]]]" = weakref.WeakKeyDictionary()


def keeps_steps(model: nn.Module) -> bool:
    """Whether a model has such a cache on."""
    return goes_by_steps(getattr(model, "_cache_config", None))


def goes_by_steps(part: Any) -> bool:
    """Whether this is the configuration, or a hook, of such a cache."""
    return type(part).__name__ in (*CONFIGS, *HOOKS)


def step_hooks(model: nn.Module) -> Mapping[str, Any]:
    """The hooks of such a cache, by the name of their module; looked for once for each cache that is switched on."""
    if not keeps_steps(model):
        return {}
    config, known = _known.get(model, (None, {}))
    if config is not model._cache_config:
        known = dict(_hooks_on(model))
        _known[model] = model._cache_config, known
    return known


def _hooks_on(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        for hook in hooks_of(module).values():
            if goes_by_steps(hook):
                yield name, hook


@contextmanager
def without_step_hooks(model: nn.Module) -> Iterator[None]:
    """Run modules without such hooks meanwhile; what a module hands through counts as made by it, as a prediction is."""
    before = []
    try:
        for name, hook in step_hooks(model).items():
            attributes = vars(model.get_submodule(name))
            before.append((attributes, attributes["forward"]))
            attributes["forward"] = _making(hook.fn_ref.original_forward)
        yield
    finally:
        for attributes, forward in before:
            attributes["forward"] = forward


def _making(forward: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return copies_of_given((args, kwargs), forward(*args, **kwargs))

    return call
