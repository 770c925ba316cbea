"""Where commands capture a model that has no weights: quiet, and with errors that say what to change."""

import inspect
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dit_pipelining.capture.capturing import CaptureCache
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.signature import bind
from dit_pipelining.costs.plan import CutPlan
from dit_pipelining.errors import USER_ERRORS, InputError
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.planning.inputs import build_inputs, with_dtype
from dit_pipelining.planning.models import TransformerSpec
from dit_pipelining.planning.weightless import build_weightless, transformer_class


@dataclass(frozen=True)
class Captured:
    """A transformer without weights, and what it does in one call."""

    model: nn.Module
    captures: CaptureCache
    graph: BlockGraph

    def split(self, cut: CutPlan) -> SplitModel:
        """Its stages."""
        return SplitModel(self.model, self.captures, self.graph, cut.partition, cut=cut)


def captured(spec: TransformerSpec, described: Mapping[str, Any], dtype: str) -> Captured:
    """Build a transformer and capture one call, with its work counted.

    Args:
        spec: of the transformer.
        described: its inputs, as `planning.inputs` describes them.
        dtype: of its weights, by its name in torch.

    Raises:
        InputError: its own forward failed on the inputs.
    """
    with capturing(spec):
        model = build_weightless(transformer_class(spec.model_class), spec.config, getattr(torch, dtype))
        captures = CaptureCache(model, None, model.forward, count_work=True)
        return Captured(
            model, captures, captures.get(bind(model.forward, (), build_inputs(with_dtype(described, dtype))))
        )


Capture = Callable[[TransformerSpec, Mapping[str, Any], str], Captured]


def once_each() -> Capture:
    """`captured` for the transformers of one model, which captures each call once however often it is asked for."""
    known: dict[str, Captured] = {}

    def get(spec: TransformerSpec, described: Mapping[str, Any], dtype: str) -> Captured:
        key = repr((spec.names, described, dtype))
        if key not in known:
            known[key] = captured(spec, described, dtype)
        return known[key]

    return get


@contextmanager
def capturing(spec: TransformerSpec) -> Iterator[None]:
    """Build and capture, or run, a model inside.

    Raises:
        InputError: its own forward failed on the inputs.
    """
    cls = transformer_class(spec.model_class)
    try:
        with torch.no_grad(), _quiet():
            yield
    except USER_ERRORS:
        raise
    except Exception as error:
        if not _raised_in(cls, error):
            raise
        raise InputError(
            f"the forward of {spec.model_class} fails on these inputs: {type(error).__name__}: {error}. Try another "
            "--height, --width or --num-frames, or describe the inputs in a file for --inputs."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Libraries warn of what concerns running the model, and it does not run; errors they log are raised as well."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


def _raised_in(cls: type, error: Exception) -> bool:
    """Whether the error came out of the model's own forward, which means that the inputs do not fit it."""
    code = inspect.getsourcefile(cls)
    return any(frame.filename == code for frame in traceback.extract_tb(error.__traceback__))
