"""Make a transformer run on all ranks while it stays the same object for the pipeline that calls it."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from diffusers.image_processor import InpaintProcessor, VaeImageProcessor
from diffusers.modular_pipelines import PipelineState
from torch import nn

from dit_pipelining.capture.branch_hooks import forget_hooks
from dit_pipelining.capture.signature import bind
from dit_pipelining.config import ParallelConfig
from dit_pipelining.errors import ConfigError
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.agreement import given_arguments
from dit_pipelining.runtime.executor import TransformerExecutor
from dit_pipelining.runtime.guiders import attach_guiders
from dit_pipelining.runtime.members import members
from dit_pipelining.runtime.owned import REFUSED, is_owned, refusal
from dit_pipelining.runtime.pending import resolved
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.runtime.step_states import begin_states
from dit_pipelining.runtime.withheld import hand_through, refuse_withheld, without_data
from dit_pipelining.sharding.token_hooks import splits_tokens_of
from dit_pipelining.torch_internals import parse_to
from dit_pipelining.weights.pipelines import refuse_compiled_whole

EXECUTOR = "_dit_pipelining_executor"
ROLLING = "_dit_pipelining_rolling"
PROCESSORS = (VaeImageProcessor, InpaintProcessor)
"""Of images and videos, before and after the pipeline."""


def attach(model: nn.Module, executor: TransformerExecutor) -> None:
    """Send calls of `model` to `executor`; its class, config, dtype and attributes stay what they are.

    The model gets a subclass of its own class with the same name, whose forward calls the executor, whose `device` is
    this rank's even where other ranks hold the weights, and which refuses to be moved.
    """
    if EXECUTOR in model.__dict__:
        raise ConfigError(
            f"this {type(model).__name__} is split over ranks already; load the pipeline again to change it."
        )
    cls: Any = type(model)
    # diffusers leaves the class's own there when a hook is removed; one that splits tokens is what the executor captures.
    own_forward = model.__dict__.get("forward")
    if getattr(own_forward, "__func__", None) is cls.forward or splits_tokens_of(model):
        del model.__dict__["forward"]
    elif own_forward is not None:
        raise ConfigError(
            f"the forward of this {cls.__name__} was replaced by {own_forward!r}, which a split would pass over. Derive a "
            "class from it instead."
        )
    model.__dict__[EXECUTOR] = executor
    model.__class__ = _parallel_class(cls)


def attach_pipeline(pipeline: Any, rolling: Rolling, *, shows: bool = True) -> None:
    """Make results leave the pipeline as ordinary tensors, ranks agree on each call, and `generate` find its runtime.

    The first rank alone shows the progress of a call.

    Args:
        pipeline: a diffusers pipeline.
        rolling: its runtime.
        shows: whether this rank returns what the pipeline made; otherwise its results hold None.
    """
    pipeline.__dict__[ROLLING] = rolling
    cls: Any = type(pipeline)
    pipeline.__class__ = _spread_class(cls, shows)
    if rolling.mesh.world_rank != 0:
        pipeline.set_progress_bar_config(disable=True)
    if not shows:
        hand_through(value for value in vars(pipeline).values() if isinstance(value, PROCESSORS))


def adopt(pipeline: Any, transformers: Mapping[str, nn.Module], config: ParallelConfig) -> bool:
    """Attach a pipeline whose transformers are all another one's, which is split already; False if none is.

    Raises:
        ConfigError: they were split otherwise, or only some of them.
    """
    executors: list[TransformerExecutor] = [
        model.__dict__[EXECUTOR] for model in transformers.values() if EXECUTOR in model.__dict__
    ]
    if not executors or rolling_of(pipeline) is not None:
        return False
    rolling = executors[0].rolling
    alike = all(executor.rolling is rolling and executor.config == config for executor in executors)
    if len(executors) < len(transformers) or not alike:
        raise ConfigError(
            f"transformers of this {type(pipeline).__name__} are split over ranks already, by another configuration or not "
            "all together. Give the same configuration, or load the pipeline again."
        )
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and name not in transformers and not is_owned(component):
            component.to(rolling.device)
    attach_pipeline(pipeline, rolling, shows=rolling.mesh.rank in config.shown_on())
    return True


def rolling_of(pipeline: Any) -> Rolling | None:
    """The runtime of an attached pipeline; None for a plain one."""
    found: Rolling | None = getattr(pipeline, "__dict__", {}).get(ROLLING)
    return found


def resolve_inputs(name: str, component: nn.Module) -> None:
    """Let a component that is on every rank wait for its inputs before it starts.

    A VAE keeps caches while it decodes; no other request may get a turn in the middle.
    """

    def ready(args: Any, kwargs: Any) -> tuple[Any, Any]:
        refuse_withheld(f"the component {name!r}", args, kwargs)
        return resolved(args), resolved(kwargs)

    component.register_forward_pre_hook(lambda _, args, kwargs: ready(args, kwargs), with_kwargs=True)
    for method in ("encode", "decode"):
        function = getattr(component, method, None)
        if callable(function):
            setattr(component, method, _with_inputs(function, ready))


def _with_inputs(function: Callable[..., Any], ready: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = ready(args, kwargs)
        return function(*args, **kwargs)

    return call


REFUSED_BY_PIPELINES = {
    "enable_model_cpu_offload": "Ranks keep their part on their device: use more ranks instead.",
    "enable_sequential_cpu_offload": "Ranks keep their part on their device: use more ranks instead.",
    "enable_group_offload": "Ranks keep their part on their device: use more ranks instead.",
    "reset_device_map": "Ranks keep their part on their device: leave it out.",
    "save_pretrained": "Weights of a split pipeline lie on different ranks: copy the folder it was loaded from.",
    "push_to_hub": "Weights of a split pipeline lie on different ranks: copy the folder it was loaded from.",
    "__deepcopy__": "A copy would need ranks of its own: load the pipeline again.",
    "__reduce_ex__": "Pickle the path that it was loaded from, and load it again.",
}
"""What a split pipeline cannot do, and what to do instead."""


@functools.cache
def _spread_class(cls: Any, shows: bool) -> Any:
    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        rolling: Rolling = self.__dict__[ROLLING]
        own_call = cls.__call__.__get__(self)
        refuse_compiled_whole(self.components)
        attach_guiders(self.components.values(), config_of)
        forget_hooks()
        begin_states()
        with rolling.call(cls.__name__, given_arguments(own_call, args, kwargs)):
            output = own_call(*args, **kwargs)
            if isinstance(output, PipelineState):  # all that a modular pipeline has made
                output.values = resolved(output.values)
            output = resolved(output)
            return output if shows else without_data(output)

    @functools.wraps(cls.to)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = {name: kwargs[name] for name in ("device", "dtype") if kwargs.get(name) is not None}
        for component in self.components.values():
            if config_of(component) is not None:
                component.to(*(arg for arg in args if arg is not None), **target)  # refuses before others are changed
        return cls.to(self, *args, **kwargs)

    def copied(self: Any) -> Any:  # shallow, as each request has one; pickling is refused
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    refused = {name: refusal(name, advice) for name, advice in REFUSED_BY_PIPELINES.items()}
    own = {"__call__": call, "__copy__": copied, "to": to, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), {**own, **refused})


def config_of(component: Any) -> ParallelConfig | None:
    """How an attached transformer is spread over ranks; None for everything else."""
    executor: TransformerExecutor | None = getattr(component, "__dict__", {}).get(EXECUTOR)
    return executor.config if executor is not None else None


def split_of(component: Any) -> SplitModel | None:
    """How an attached transformer was split; None before its first call, and for everything else."""
    executor = getattr(component, "__dict__", {}).get(EXECUTOR)
    return executor.split if executor is not None else None


@functools.cache
def _parallel_class(cls: Any) -> Any:
    @torch.compiler.disable  # what a caller compiles around it, such as a loop of their own, takes it as it is
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own_forward = cls.forward.__get__(self)
        return self.__dict__[EXECUTOR](bind(own_forward, args, kwargs))

    def device(self: nn.Module) -> torch.device:
        return self.__dict__[EXECUTOR].device

    def parameters(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        every = list(cls.parameters(self, recurse))
        if every and every[0].device.type == "meta":
            # Pipelines ask `next(transformer.parameters())` where and of which dtype the transformer is.
            own = torch.empty(0, dtype=every[0].dtype, device=self.__dict__[EXECUTOR].device)
            every.insert(0, nn.Parameter(own, requires_grad=False))
        return iter(every)

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        target, dtype = parse_to(*args, **kwargs)
        own = self.__dict__[EXECUTOR].device
        same_device = target is None or target == own or (target.type == own.type and target.index is None)
        if same_device and dtype in (None, getattr(self, "dtype", None)):
            return self
        raise ConfigError(
            f"{cls.__name__} is split over ranks and stays on {own} of each; it cannot be moved to "
            f"{target or dtype}. Give `dtype=` to load_pipeline instead."
        )

    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        raise ConfigError(
            f"{cls.__name__} is split over ranks: it cannot be cast or moved as a whole (half(), float(), cuda(), ...). Give "
            "`dtype=` to load_pipeline instead."
        )

    own = {
        **members(
            cls,
            lambda model: model.__dict__[EXECUTOR].awaits_weights,
            lambda model: model.__dict__[EXECUTOR].holds_parts,
            lambda model: model.__dict__[EXECUTOR].config,
        ),
        "forward": forward,
        "device": property(device),
        "parameters": parameters,
        "to": to,
        "_apply": apply,
        "__module__": cls.__module__,
        **{name: refusal(name, advice) for name, advice in REFUSED.items()},
    }
    return type(cls.__name__, (cls,), own)
