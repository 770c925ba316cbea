"""Errors that one rank raised and others raise too."""

import pickle
from collections.abc import Sequence
from typing import Any


def portable(error: Exception, note: str) -> Exception:
    """The error as other ranks can raise it: of the same type where that can be rebuilt from what is pickled.

    Else of a type with that name, since ranks compare by name how a call has ended.
    """
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = _namesake(type(error).__name__, f"{type(error).__name__}: {error}")
    copy.add_note(note)
    return copy


def _namesake(name: str, message: str, notes: Sequence[str] = ()) -> RuntimeError:
    """A RuntimeError whose type has this name."""

    def reduced(error: RuntimeError) -> tuple[Any, ...]:
        return _namesake, (name, message, getattr(error, "__notes__", ()))

    error: RuntimeError = type(name, (RuntimeError,), {"__reduce__": reduced})(message)
    for note in notes:
        error.add_note(note)
    return error
