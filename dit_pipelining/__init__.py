"""Split diffusion transformers into pipeline stages, and run unmodified diffusers pipelines over them."""

import importlib
from typing import Any

__version__ = "0.1.0"

PUBLIC = (
    "ParallelConfig",
    "SplitModel",
    "StreamSpec",
    "VideoStream",
    "generate",
    "launch",
    "load_config",
    "load_pipeline",
    "open_stream",
    "parallelize",
    "serve",
    "split_model",
)
"""Names of `dit_pipelining.api`, imported when they are first asked for, since diffusers takes seconds to import."""


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(importlib.import_module("dit_pipelining.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
