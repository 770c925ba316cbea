"""Make a transformer run on all ranks while it stays the same object for the pipeline that calls it."""

import functools
from typing import Any

import torch
from torch import nn

from dit_pipelining.capture.signature import bind
from dit_pipelining.errors import ConfigError
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.runtime.executor import TransformerExecutor
from dit_pipelining.torch_internals import parse_to

EXECUTOR = "_dit_pipelining_executor"


def attach(model: nn.Module, executor: TransformerExecutor) -> None:
    """Send calls of `model` to `executor`; its class, config, dtype and attributes stay what they are.

    The model gets a subclass of its own class with the same name, whose forward calls the executor, whose `device` is
    this rank's even where other ranks hold the weights, and which refuses to be moved.
    """
    model.__dict__[EXECUTOR] = executor
    cls: Any = type(model)
    model.__class__ = _parallel_class(cls)


def split_of(component: Any) -> SplitModel | None:
    """How an attached transformer was split; None before its first call, and for everything else."""
    executor = getattr(component, "__dict__", {}).get(EXECUTOR)
    return executor.split if executor is not None else None


@functools.cache
def _parallel_class(cls: Any) -> Any:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own_forward = cls.forward.__get__(self)
        return self.__dict__[EXECUTOR](bind(own_forward, args, kwargs))

    def device(self: nn.Module) -> torch.device:
        return self.__dict__[EXECUTOR].device

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        target, dtype = parse_to(*args, **kwargs)
        own = self.__dict__[EXECUTOR].device
        same_device = target is None or target == own or (target.type == own.type and target.index is None)
        if same_device and dtype in (None, getattr(self, "dtype", None)):
            return self
        raise ConfigError(
            f"{cls.__name__} is split over ranks and stays on {own} of each; it cannot be moved to "
            f"{target or dtype}. Give `device=` and `torch_dtype=` to load_pipeline instead."
        )

    members = {"forward": forward, "device": property(device), "to": to, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), members)
