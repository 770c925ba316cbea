"""What a split transformer does otherwise than its class, or refuses, beside its forward."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from dit_pipelining.capture.hooks import CACHES
from dit_pipelining.capture.step_caches import goes_by_steps
from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import ConfigError
from dit_pipelining.runtime.step_states import begin_states, branch_named, check_can_keep
from dit_pipelining.weights.given import stand_ins
from dit_pipelining.weights.quantised import is_quantised, layers_without_weights_differ

REFUSED = {
    "enable_parallelism": "it is split by stages already. Choose the degrees in ParallelConfig",
    "compile": "the forward runs on several ranks. Give ParallelConfig(compile='blocks')",
}
"""Methods that a split transformer cannot follow, and why; see also `owned.REFUSED`, which holds for all components."""

NEED_WEIGHTS = ("add_adapter", "enable_layerwise_casting", "fuse_lora", "fuse_qkv_projections")
"""Methods that read or write the weights, which a rank has from the pipeline's first call on."""


CHANGE_WEIGHTS = (*NEED_WEIGHTS, "load_lora_adapter")
"""Methods that change or add weights of blocks, which a rank may hold a part of only."""


def members(
    cls: Any,
    awaits_weights: Callable[[nn.Module], bool],
    holds_parts: Callable[[nn.Module], bool],
    config_of: Callable[[nn.Module], ParallelConfig],
) -> dict[str, Any]:
    """Methods for a subclass of a transformer's class.

    Args:
        cls: the class.
        awaits_weights: whether a model's checkpoint is yet to be read.
        holds_parts: whether a model's blocks are cut or sharded over ranks.
        config_of: how a model is spread over ranks.
    """
    found: dict[str, Any] = {name: _refused(cls, name, why) for name, why in REFUSED.items() if hasattr(cls, name)}
    found |= {name: _later(cls, name, awaits_weights) for name in NEED_WEIGHTS if hasattr(cls, name)}
    if hasattr(cls, "load_lora_adapter"):
        found["load_lora_adapter"] = _adapter_loader(cls, awaits_weights)
    if hasattr(cls, "enable_cache"):
        found |= {
            "enable_cache": _cache_enabler(cls, config_of),
            "cache_context": branch_named,
            "_reset_stateful_cache": lambda model, recurse=True: begin_states(),
        }
    if "enable_layerwise_casting" in found:
        found["enable_layerwise_casting"] = _caster(found["enable_layerwise_casting"], config_of)
    if "fuse_lora" in found:
        found["fuse_lora"] = _into_plain_weights(cls, found["fuse_lora"])
    for name in CHANGE_WEIGHTS:
        if name in found:
            found[name] = _of_whole_weights(cls, name, found[name], holds_parts)
    return found


def _refused(cls: Any, name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"{cls.__name__} is split over ranks, so {name} is not possible: {why}.")

    return refuse


def _cache_enabler(cls: Any, config_of: Callable[[nn.Module], ParallelConfig]) -> Callable[..., None]:
    @functools.wraps(cls.enable_cache)
    def enable(self: nn.Module, config: Any) -> None:
        if not goes_by_steps(config):
            raise ConfigError(
                f"{cls.__name__} is split over ranks, so {type(config).__name__} is not possible: {CACHES}."
            )
        check_can_keep(config_of(self))
        cls.enable_cache(self, config)

    return enable


def _caster(method: Callable[..., Any], config_of: Callable[[nn.Module], ParallelConfig]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        config = config_of(self)
        if config.compile is not None or config.rebalance:
            raise ConfigError(
                "enable_layerwise_casting works with layers that are neither compiled nor moved: leave `compile` and "
                "`rebalance` out of ParallelConfig."
            )
        return method(self, *args, **kwargs)

    return call


def _later(cls: Any, name: str, awaits_weights: Callable[[nn.Module], bool]) -> Callable[..., Any]:
    original = getattr(cls, name)

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if awaits_weights(self):
            raise ConfigError(
                f"{name} needs the weights of {cls.__name__}, which are read at the pipeline's first call. Call the pipeline "
                "once before, or load it with from_pretrained and split it with `parallelize`."
            )
        return original(self, *args, **kwargs)

    return call


def _of_whole_weights(
    cls: Any, name: str, method: Callable[..., Any], holds_parts: Callable[[nn.Module], bool]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if holds_parts(self):
            raise ConfigError(
                f"{name} works on whole weights, but ranks hold parts of those of {cls.__name__} (tensor_parallel_size or "
                "use_hsdp). Load the transformer with from_pretrained, use fuse_lora, and then `parallelize`; or give the "
                "ranks to pipeline_parallel_size."
            )
        return method(self, *args, **kwargs)

    return call


def _into_plain_weights(cls: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_quantised(self):
            raise ConfigError(
                f"fuse_lora adds adapters to the weights of {cls.__name__}, which are quantised, and a rank has those of its "
                "own layers only. Leave the adapters unfused, which gives their full effect; or fuse them into the "
                "transformer before it is quantised."
            )
        return method(self, *args, **kwargs)

    return call


def _adapter_loader(cls: Any, awaits_weights: Callable[[nn.Module], bool]) -> Callable[..., Any]:
    original = cls.load_lora_adapter

    @functools.wraps(original)
    def load(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not awaits_weights(self):
            return original(self, *args, **kwargs)
        if layers_without_weights_differ(self):
            raise ConfigError(
                f"{cls.__name__} is quantised by bitsandbytes, and an adapter for such a layer is made by what the layer has "
                "of its weights, which are read at the pipeline's first call. Call the pipeline once before, or load it with "
                "from_pretrained and split it with `parallelize`."
            )
        with stand_ins(self):
            return original(self, *args, **kwargs)

    return load
