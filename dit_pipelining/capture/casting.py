"""Layerwise casting of diffusers: a layer casts its weights before it runs, and back again after it.

That is the layer's own affair, on each rank that runs it. Only tensors without data cannot be cast in place, so a forward is
recorded with weights that are cast for the call.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from dit_pipelining.diffusers_hooks import hooks_of
from dit_pipelining.errors import ConfigError

CASTING = "LayerwiseCastingHook"
"""The name that the hook's class has in diffusers."""

HARMLESS = (CASTING, "PeftInputAutocastDisableHook")


def refuse_cutting_casts(models: Mapping[str, nn.Module], asked: Iterable[str]) -> None:
    """Refuse what cuts weights that layers cast, or compiles the layers.

    Args:
        models: transformers, by name.
        asked: what does that, by its name in the configuration.

    Raises:
        ConfigError: names the transformer and what was asked.
    """
    for option in asked:
        for name, model in models.items():
            if any(True for _ in _casting_layers(model)):
                raise ConfigError(
                    f"{option}: layers of {name!r} ({type(model).__name__}) cast their weights for each call (layerwise "
                    f"casting), which works with whole weights that are not compiled. Leave {option} or the casting out."
                )


@contextmanager
def cast_for_calls(model: nn.Module) -> Iterator[None]:
    """Run layers meanwhile with weights that are cast for the call, instead of casting their own."""
    before = []
    try:
        for layer, hook in list(_casting_layers(model)):
            before.append((vars(layer), vars(layer)["forward"]))
            vars(layer)["forward"] = _on_cast_weights(layer, hook)
        yield
    finally:
        for attributes, forward in before:
            attributes["forward"] = forward


def _casting_layers(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    for module in model.modules():
        for hook in hooks_of(module).values():
            if type(hook).__name__ == CASTING:
                yield module, hook


def _on_cast_weights(layer: nn.Module, hook: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        own = dict(layer._parameters)
        try:
            for name, weight in own.items():
                if weight is not None and weight.is_floating_point():
                    layer._parameters[name] = weight.to(hook.compute_dtype)  # type: ignore[assignment]
            return hook.fn_ref.forward(*args, **kwargs)
        finally:
            layer._parameters.update(own)

    return call
