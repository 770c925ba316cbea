"""Sequence parallelism: split the tokens of each call over ranks, before the model is captured.

Hooks on the model's modules split its tokens and join them at its end, as its plan says; between them every block works on
this rank's tokens, and only its attention meets the other ranks. So a stage gets this rank's part and sends it on.
"""

import math
from collections.abc import Iterator

from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import nn

from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.groups import SequenceGroups
from dit_pipelining.sharding.sequence_plans import SequencePlan, sequence_plan
from dit_pipelining.sharding.sp_plan import ModulePlan
from dit_pipelining.sharding.token_hooks import AttentionHook, TokenHook, Tokens, sp_gather, sp_shard

__all__ = ["apply_sequence_parallel", "check_sequence_parallel", "sp_gather", "sp_shard"]

SDPA_BACKENDS = {
    AttentionBackendName.NATIVE,
    AttentionBackendName._NATIVE_CUDNN,
    AttentionBackendName._NATIVE_EFFICIENT,
    AttentionBackendName._NATIVE_FLASH,
    AttentionBackendName._NATIVE_MATH,
}
"""diffusers' attention backends that call torch's `scaled_dot_product_attention`."""


def apply_sequence_parallel(
    model: nn.Module,
    groups: SequenceGroups,
    *,
    uneven: bool = False,
) -> None:
    """Split the tokens of each call of a model over ranks; its inputs and outputs stay what they are on every rank.

    Args:
        model: a diffusers transformer, or one that brings an `_sp_plan`; changed in place, before it is captured.
        groups: the ranks that share the tokens; they make the same calls.
        uneven: any number of tokens, at the price of a message between hosts at each attention.

    Raises:
        ConfigError: the model cannot be split by tokens, or not by so many; says why, and what can be.
    """
    check_sequence_parallel(model, groups.ulysses_degree)
    found = sequence_plan(model)
    tokens = Tokens(groups, uneven or found.uneven, found.latents)
    for name, module in list(attention_modules(model, found)):
        _register(module, AttentionHook(name, tokens, found.splits_text), "sequence_attention")
    for name, entry in {"": ModulePlan(), **found.modules}.items():
        _register(model.get_submodule(name), TokenHook(name, entry, tokens), "sequence_tokens")


def check_sequence_parallel(
    model: nn.Module,
    ulysses_degree: int,
    tensor_parallel_size: int = 1,
) -> None:
    """Check what can be said before anything is loaded.

    Raises:
        ConfigError: there is no plan for the model, its heads cannot be exchanged among so many ranks, or its attention
            backend has no place for the exchange.
    """
    heads = shared_heads(model)
    ranks = ulysses_degree * tensor_parallel_size
    if ulysses_degree > 1 and heads % ranks:
        works = [str(n) for n in range(1, heads // tensor_parallel_size + 1) if heads % (n * tensor_parallel_size) == 0]
        beside = f" beside tensor_parallel_size={tensor_parallel_size}" if tensor_parallel_size > 1 else ""
        raise ConfigError(
            f"ulysses_degree={ulysses_degree}: the {heads} heads of {type(model).__name__} cannot be shared evenly{beside}. "
            f"Degrees that work: {', '.join(works)}; ring_degree takes any number."
        )


def shared_heads(model: nn.Module) -> int:
    """The number of heads by which a Ulysses degree has to divide; 0: not known.

    Raises:
        ConfigError: there is no plan for the model, or its attention backend has no place for the exchange.
    """
    heads = 0
    for name, module in attention_modules(model, sequence_plan(model)):
        _check_backend(name, module)
        for count in ("heads", "kv_heads", "num_heads"):
            number = getattr(module, count, None)
            heads = math.gcd(heads, number) if isinstance(number, int) else heads
    return heads


def attention_modules(model: nn.Module, plan: SequencePlan) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose attention spans the tokens of all ranks; blocks, where these hold none that can be told."""
    inside = plan.inside or tuple(name for name, part in model.named_children() if isinstance(part, nn.ModuleList))
    for name, block in model.named_modules():
        parent, _, _ = name.rpartition(".")
        if parent not in inside:
            continue
        found = [(path, part) for path, part in block.named_modules() if callable(getattr(part, "processor", None))]
        if found:
            yield from ((f"{name}.{path}", part) for path, part in found)
        else:
            yield name, block


def _check_backend(name: str, module: nn.Module) -> None:
    processor = getattr(module, "processor", None)
    if processor is None or not hasattr(processor, "_attention_backend"):
        return
    backend = processor._attention_backend or _AttentionBackendRegistry.get_active_backend()[0]
    if AttentionBackendName(backend) not in SDPA_BACKENDS:
        raise ConfigError(
            f"{name} uses the attention backend {AttentionBackendName(backend).value!r}. With ulysses_degree or ring_degree "
            f"use one of torch's: {', '.join(sorted(known.value for known in SDPA_BACKENDS))}."
        )


def _register(module: nn.Module, hook: ModelHook, name: str) -> None:
    registry = HookRegistry.check_if_exists_or_initialize(module)
    if registry.get_hook(name) is not None:
        raise ConfigError(f"the tokens of this {type(module).__name__} are split over ranks already.")
    registry.register_hook(hook, name)
