"""What modules keep from step to step (see capture/step_caches.py), apart for each call of the pipeline and each branch."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from diffusers.hooks.hooks import CacheContext, ModelHook, StateManager
from torch import nn

from dit_pipelining.capture.step_caches import keeps_steps, step_hooks
from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import ConfigError

Branch = tuple[int, str, int]
"""A transformer, the name of the cache context, and which part of a batch that is cut."""


@dataclass(eq=False)
class StepStates:
    """Of one call of the pipeline, on this rank; they end with it.

    Attributes:
        replicas: that run each branch: its states are there.
        managers: copies of those on the hooks, for each branch.
    """

    replicas: dict[Branch, int] = field(default_factory=dict)
    managers: dict[tuple[Branch, ModelHook, str], StateManager] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class StepCall:
    """One call of a transformer whose modules keep something from step to step."""

    states: StepStates
    branch: Branch
    context: CacheContext

    @contextmanager
    def entered(self, model: nn.Module) -> Iterator[None]:
        """Give the hooks of a model the states of this call meanwhile."""
        replaced = []
        try:
            for hook in step_hooks(model).values():
                for name, manager in list(vars(hook).items()):
                    if isinstance(manager, StateManager):
                        key = self.branch, hook, name
                        own = self.states.managers.setdefault(key, copy.deepcopy(manager))
                        own.set_context(self.context)
                        replaced.append((hook, name, manager))
                        setattr(hook, name, own)
            yield
        finally:
            for hook, name, manager in replaced:
                setattr(hook, name, manager)


_states: ContextVar[StepStates] = ContextVar("states of the modules of this call of the pipeline")
_contexts: ContextVar[Mapping[int, CacheContext]] = ContextVar("cache contexts of transformers")


def begin_states() -> None:
    """Start anew: a call of the pipeline begins, or a loop of the caller's own asks for it."""
    _states.set(StepStates())


@contextmanager
def branch_named(model: nn.Module, name: str, **where: Any) -> Iterator[None]:
    """Stands in for a transformer's `cache_context`, whose calls run later."""
    token = _contexts.set({**_contexts.get({}), id(model): CacheContext(name, **where)})
    try:
        yield
    finally:
        _contexts.reset(token)


def step_call(model: nn.Module, part: int) -> StepCall | None:
    """How a call that is made now, of this part of its batch, finds its states; None: its modules keep none.

    Raises:
        ConfigError: it is made outside of `cache_context`.
    """
    if not keeps_steps(model):
        return None
    context = _contexts.get({}).get(id(model))
    if context is None:
        raise ConfigError(
            f"{type(model).__name__} has a cache, but was called outside of its cache_context(name), by which the cache tells "
            "branches apart. Make the call inside of it, or call disable_cache()."
        )
    if (states := _states.get(None)) is None:
        begin_states()
        states = _states.get()
    return StepCall(states, (id(model), context.name, part), context)


def check_can_keep(config: ParallelConfig) -> None:
    """Check that modules can keep something from step to step.

    Raises:
        ConfigError: names the field that does not allow it.
    """
    within = {
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "ulysses_degree or ring_degree": config.sequence_parallel_size > 1,
        "use_hsdp": config.use_hsdp,
        "compile": config.compile is not None,
        'schedule="gpipe"': config.schedule == "gpipe",
    }
    for name, is_asked in within.items():
        if is_asked:
            raise ConfigError(
                f"a cache is on, whose modules keep something from step to step, together with {name}. Caches work with stages "
                "and replicas (pipeline_parallel_size, cfg_parallel_size) only: leave one of the two out."
            )
