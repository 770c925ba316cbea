"""Where commands capture a model that has no weights: quiet, and with errors that say what to change."""

import inspect
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dit_pipelining.errors import USER_ERRORS, InputError
from dit_pipelining.planning.models import TransformerSpec
from dit_pipelining.planning.weightless import transformer_class


@contextmanager
def capturing(spec: TransformerSpec) -> Iterator[None]:
    """Build and capture a model inside.

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
