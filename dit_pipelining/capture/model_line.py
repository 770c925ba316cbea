"""Where in the model's code a forward is, for messages."""

import os
import traceback
from pathlib import Path

import torch

NOT_THE_MODEL = ("<", *(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])))
"""How the file names of code begin that is not the model's: generated code, torch, this package."""


def model_line() -> str:
    """The innermost frame outside torch and this package."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(NOT_THE_MODEL):
            return f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"
    return "an unknown line"
