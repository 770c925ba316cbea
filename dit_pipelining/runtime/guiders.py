"""Guiders of modular pipelines: what they would put on the transformer's blocks goes with the call instead."""

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.hooks import layer_skip, smoothed_energy_guidance_utils
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dit_pipelining.capture.branch_hooks import BranchHook, ask_hooks, read_hooks
from dit_pipelining.capture.module_hooks import KINDS
from dit_pipelining.config import ParallelConfig
from dit_pipelining.diffusers_hooks import REGISTRY
from dit_pipelining.errors import ConfigError
from dit_pipelining.torch_internals import FSDP_ATTRIBUTES

SHELLS = "_dit_pipelining_shells"


REPEATABLE = (
    layer_skip.AttentionProcessorSkipHook,
    layer_skip.FeedForwardSkipHook,
    layer_skip.TransformerBlockSkipHook,
    smoothed_energy_guidance_utils.SmoothedEnergyGuidanceHook,
)
"""Kinds of hooks that do the same at every call."""

ConfigOf = Callable[[Any], ParallelConfig | None]
"""How a model is spread over ranks; None: it is not."""

LEFT_BY_HOOKS = REGISTRY, "forward"
"""What hooks leave on a module."""


def attach_guiders(components: Iterable[Any], config_of: ConfigOf) -> None:
    """Let the guiders among a pipeline's components hand their hooks to split transformers; see [Note: hooks of a branch].

    Args:
        components: of a pipeline.
        config_of: of a model among them.
    """
    for guider in components:
        if isinstance(guider, BaseGuidance) and SHELLS not in vars(guider):
            vars(guider)[SHELLS] = _Shells()
            cls: Any = type(guider)
            guider.__class__ = _class_of_split(cls, config_of)


def check_repeatable(hooks: Iterable[BranchHook]) -> None:
    """Check that hooks do the same at every call.

    Raises:
        ConfigError: names the first that does not.
    """
    for hook in hooks:
        if hook.kind not in REPEATABLE:
            raise ConfigError(
                f"the guider puts a {hook.kind.__name__} on {hook.module!r}, which is not known to do the same at every call; "
                f"on a split model only {', '.join(kind.__name__ for kind in REPEATABLE)} are."
            )
        if (chance := dict(hook.options).get("dropout", 1.0)) != 1.0:
            raise ConfigError(
                f"the guider drops what {hook.module!r} gives with a chance of {chance}; the ranks of a split model would "
                "draw other numbers than one process. Use dropout=1.0, which skips the layer."
            )


class _Shells:
    """The modules of transformers without their weights, for a guider to put its hooks on; a copy begins without any."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Hashable, nn.Module]] = {}

    def of(self, model: nn.Module) -> nn.Module:
        structure = tuple(
            (name, type(module), type(getattr(module, "processor", None)))
            for child in model.children()
            for name, module in child.named_modules()
        )
        known, shell = self._made.get(id(model), (None, None))
        if shell is None or known != structure:
            shell = _shell(model)
            self._made[id(model)] = structure, shell
        return shell

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shells":
        return _Shells()


def _shell(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(blank, requires_grad=False) if is_parameter else blank
    for module in model.modules():
        memo |= {id(vars(module)[key]): None for key in LEFT_BY_HOOKS if key in vars(module)}
        memo |= {id(getattr(module, kind)): OrderedDict() for kind in KINDS}  # a caller's may hold the whole pipeline
        memo |= {id(value): value for value in vars(module).values() if isinstance(value, dist.ProcessGroup)}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            memo[id(module)] = _whole(module, memo)
    shell = nn.Module()
    for name, child in model.named_children():
        shell.add_module(name, copy.deepcopy(child, memo))
    for module in shell.modules():
        for key in LEFT_BY_HOOKS:
            vars(module).pop(key, None)
    return shell


def _whole(block: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a block whose weights are sharded, which FSDP forbids, as the block was before: of its own class."""
    cls: Any = type(block).__bases__[1]  # the other one is FSDPModule
    copied: nn.Module = cls.__new__(cls)
    nn.Module.__init__(copied)
    own = {
        key: value for key, value in vars(block).items() if not key.endswith("_hooks") and key not in FSDP_ATTRIBUTES
    }
    vars(copied).update(copy.deepcopy(own, memo))
    return copied


@functools.cache
def _class_of_split(cls: Any, config_of: ConfigOf) -> Any:
    def prepare_models(self: Any, denoiser: Any) -> None:
        config = config_of(denoiser)
        if config is None:
            cls.prepare_models(self, denoiser)
            return
        shell = vars(self)[SHELLS].of(denoiser)
        cls.prepare_models(self, shell)
        hooks = read_hooks(shell)
        check_repeatable(hooks)
        if hooks and config.tensor_parallel_size * config.sequence_parallel_size > 1:
            raise ConfigError(
                f"{cls.__name__} changes what blocks do, which is not possible where each block is on several ranks "
                "(tensor_parallel_size, ulysses_degree, ring_degree). Use pipeline stages and replicas only, or another guider."
            )
        ask_hooks(denoiser, hooks)

    def cleanup_models(self: Any, denoiser: Any) -> None:
        if config_of(denoiser) is None:
            cls.cleanup_models(self, denoiser)
            return
        cls.cleanup_models(self, vars(self)[SHELLS].of(denoiser))
        ask_hooks(denoiser, ())

    own = {"prepare_models": prepare_models, "cleanup_models": cleanup_models, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)
