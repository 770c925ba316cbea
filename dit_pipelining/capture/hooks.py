"""Hooks of diffusers and accelerate that a split model cannot follow."""

from torch import nn

from dit_pipelining.capture.casting import HARMLESS
from dit_pipelining.capture.step_caches import goes_by_steps, keeps_steps
from dit_pipelining.diffusers_hooks import hooks_of
from dit_pipelining.errors import ConfigError

CACHES = (
    "what it skips is known from the first block's result, it gives the first block what the last one made, or it asks the "
    "pipeline for the step when a block runs; the blocks are on several ranks, and several calls are on their way at a time. "
    "Use TaylorSeerCacheConfig, whose modules decide by themselves, or call disable_cache() before the model is split"
)
OFFLOADS = (
    "each rank holds its own stage, on its own device, and nothing is moved during a call. Leave offloading and "
    "`device_map` out; more stages need less memory each"
)
GUIDES = "it changes what blocks do between two calls, and the calls are recorded once. Leave it out"

TOKENS = (
    "tokens are split where all stages know of it. Leave enable_parallelism out: give `ulysses_degree` or `ring_degree`"
)

REASONS = {
    "cp_input": TOKENS,
    "cp_output": TOKENS,
    "offload": OFFLOADS,
    "cache": CACHES,
    "fbc_": CACHES,
    "pyramid_attention_broadcast": CACHES,
}
"""Why a hook is refused, by a part of the name that diffusers gives it."""


CAPTURED = "is_captured"
"""A hook with this attribute does nothing but torch's calls on its module's inputs and outputs, which are recorded."""


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks that keep state from call to call, cast weights or move them.

    Raises:
        ConfigError: names the first hook and its module, why it is refused and what to do.
    """
    for name, module in model.named_modules():
        hooks = [
            str(name)
            for name, hook in hooks_of(module).items()
            if not (getattr(hook, CAPTURED, False) or type(hook).__name__ in HARMLESS)
            and not (keeps_steps(model) and goes_by_steps(hook))
        ]
        if "_hf_hook" in vars(module):
            hooks.append("accelerate's offload or device_map")
        if hooks:
            raise ConfigError(
                f"{type(model).__name__} has the hook {hooks[0]!r} on {name or 'itself'}, which a split model cannot follow: "
                f"{_reason(hooks[0])}."
            )


def refuse_cache(model: nn.Module) -> None:
    """Refuse a model whose cache is on; cheap enough for every call.

    Raises:
        ConfigError: names the cache.
    """
    config = getattr(model, "_cache_config", None)
    if config is not None and not keeps_steps(model):
        raise ConfigError(f"{type(model).__name__} has {type(config).__name__} on, but it is split: {CACHES}.")


def _reason(hook: str) -> str:
    return next((reason for part, reason in REASONS.items() if part in hook), GUIDES)
