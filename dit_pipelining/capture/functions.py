"""Kinds of torch's functions, as far as recording a call of them depends on it, and what draws random numbers beside them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
from torch import nn

from dit_pipelining.errors import CaptureError

NOT_RECORDED = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "grad_fn",
    }
    | {"ndim", "is_leaf", "names", "itemsize", "nbytes", "is_cpu", "is_xpu", "is_mps", "is_nested", "_version"}
)
"""Properties whose answers do not depend on values."""

RANDOM = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "random", "normal", "uniform"}
    | {"bernoulli", "multinomial", "poisson", "exponential", "cauchy", "geometric", "log_normal"}
)
"""Names of torch's functions that draw random numbers, and, with an underscore, of methods that fill a tensor."""

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def name_of(func: Any) -> str:
    """Its name, in messages too."""
    return getattr(func, "__name__", str(func))


def is_plain_property(func: Any) -> bool:
    """Whether it reads a property that does not depend on values."""
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") in NOT_RECORDED


def is_random(func: Any, kwargs: Any) -> bool:
    """Whether a call of it draws from the global generator."""
    if name_of(func) in DROPOUTS:
        return bool(kwargs.get("training")) and kwargs.get("p", 0.5) > 0
    return name_of(func).removesuffix("_") in RANDOM and kwargs.get("generator") is None


def sets_data(func: Any) -> bool:
    """Whether it is `x.data = y`, which torch does not count as a write."""
    return getattr(func, "__name__", "") == "__set__" and getattr(func.__self__, "__name__", "") == "data"


@contextmanager
def no_other_randomness(model: nn.Module) -> Iterator[None]:
    """Refuse glue that draws from Python's or NumPy's generators, whose draws would be frozen into the graph."""
    before = random.getstate(), repr(numpy.random.get_state(legacy=False))
    yield
    if (random.getstate(), repr(numpy.random.get_state(legacy=False))) != before:
        raise CaptureError(
            f"the forward of {type(model).__name__} draws random numbers from Python's or NumPy's generator. Ranks would "
            "draw different ones; pass the numbers in as an input."
        )
