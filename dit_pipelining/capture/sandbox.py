"""Run a model's forward on tensors without data and leave no trace in the model."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dit_pipelining.torch_internals import is_fake

CAPTURE_LOCK = threading.RLock()
"""One capture at a time in a process: it exchanges parameters and the way modules are called."""


@contextmanager
def exchanged_tensors(
    model: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[dict[int, str]]:
    """Exchange every parameter and buffer for `replacement(tensor)`; yields the names of the replacements by id.

    Tied tensors stay tied. Everything the forward writes on modules meanwhile (cached tables, moved tensors, buffers) is
    undone afterwards, and function caches of the model's code are emptied, since they would hold tensors without data; such
    tensors are taken out of the global tables of its packages.
    """
    modules = dict(model.named_modules())
    made: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}
    saved = _saved_state(modules.values())
    tables = [(table, _copy(table)) for table in _global_tables(modules.values())]
    _empty_function_caches(modules.values())
    try:
        for prefix, module in modules.items():
            module.__dict__.pop("_compiled_call_impl", None)  # `module.compile()`: nothing to compile for without data
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        if id(tensor) not in made:
                            made[id(tensor)] = replacement(tensor)
                            names[id(made[id(tensor)])] = f"{prefix}.{name}" if prefix else name
                        tensors[name] = made[id(tensor)]
        yield names
    finally:
        for container, content in saved:
            _restore(container, content)
        for table, content in tables:
            _take_out_fakes(table, content)
        _empty_function_caches(modules.values())


@contextmanager
def intercepted_calls(
    intercept: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[Callable[..., Any]]:
    """Send every `module(...)` of this thread through `intercept(module, args, kwargs)`; yields the plain call."""
    plain_call = nn.Module.__call__
    thread = threading.get_ident()

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return plain_call(module, *args, **kwargs)
        return intercept(module, args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield plain_call
    finally:
        nn.Module.__call__ = plain_call  # type: ignore[method-assign]


@contextmanager
def intercepted_function(model: nn.Module, name: str, intercept: Callable[..., Any]) -> Iterator[None]:
    """Send calls of a function, by its name in the files of the model's code, through `intercept(original, *args)`."""
    saved = [(file, getattr(file, name)) for file in _code_files(model) if callable(getattr(file, name, None))]
    try:
        for file, original in saved:
            setattr(file, name, partial(intercept, original))
        yield
    finally:
        for file, original in saved:
            setattr(file, name, original)


@contextmanager
def collected_lora_scales(model: nn.Module) -> Iterator[list[float]]:
    """Collects the scales that the forward's wrapper gives to LoRA layers, and leaves the layers as they are.

    diffusers scales the LoRA layers of the whole model around its forward (`scale_lora_layers`); each stage has to do
    that to its own layers.
    """
    scales: list[float] = []

    def scale(original: Callable[..., Any], model: nn.Module, weight: float) -> None:
        scales.append(weight)

    def unscale(original: Callable[..., Any], model: nn.Module, weight: float | None = None) -> None:
        return None

    with (
        intercepted_function(model, "scale_lora_layers", scale),
        intercepted_function(model, "unscale_lora_layers", unscale),
    ):
        yield scales


def _code_files(model: nn.Module) -> list[ModuleType]:
    """Python modules that the model's code, and the wrapper around its forward, live in."""
    own = {type(module).__module__ for module in model.modules()}
    names = {name for name in own if not name.startswith("torch.")} | SHARED_CODE
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


SHARED_CODE = {"diffusers.utils.peft_utils", "torch.nn.attention.flex_attention"}
"""Where models find functions that they do not import by name."""


def _saved_state(modules: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """Copies of everything that a forward could change on its modules.

    That is their attributes, the containers in these, and the attributes of plain objects of the model's own code (a
    rotary embedder that keeps a table), however deep.
    """
    modules = list(modules)
    packages = {type(module).__module__.split(".")[0] for module in modules} - {"torch"}
    pending: list[Any] = [vars(module) for module in modules]
    saved: dict[int, tuple[Any, Any]] = {}
    while pending:
        value = pending.pop()
        if isinstance(value, nn.Module | type) or id(value) in saved:
            continue
        if isinstance(value, dict | list | set):
            saved[id(value)] = value, _copy(value)
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            pending += value
        elif type(value).__module__.split(".")[0] in packages and isinstance(getattr(value, "__dict__", None), dict):
            pending.append(vars(value))
    return list(saved.values())


def _global_tables(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The global dicts, lists and sets in all files of the packages that the modules' classes are from."""
    packages = {type(module).__module__.split(".")[0] for module in modules} - {"torch"}
    for name, file in list(sys.modules.items()):
        if name.split(".")[0] in packages and isinstance(file, ModuleType):
            for key, value in list(vars(file).items()):
                if isinstance(value, dict | list | set) and not key.startswith("__"):
                    yield value


def _take_out_fakes(table: Any, content: Any) -> None:
    """Undo what put tensors without data into a table. What else came to it, as from an import, stays."""
    if not isinstance(table, dict):
        if len(table) != len(content) and any(_holds_fakes(item) for item in table):
            _restore(table, content)
        return
    for key, value in list(table.items()):
        if content.get(key, table) is not value and _holds_fakes(value):
            del table[key]
            if key in content:
                table[key] = content[key]


def _holds_fakes(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return is_fake(value)
    if isinstance(value, dict):
        return any(map(_holds_fakes, value.values()))
    return isinstance(value, list | tuple | set) and any(map(_holds_fakes, value))


def _copy(container: Any) -> Any:
    kind = next(kind for kind in (dict, list, set) if isinstance(container, kind))
    return kind(container)


def _restore(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    elif _differs(container, content):
        container.clear()
        container.update(content)


def _differs(value: Any, content: Any) -> bool:
    if len(value) != len(content):
        return True
    if isinstance(value, dict):
        return any(content.get(name, value) is not item for name, item in value.items())
    return any(item not in content for item in value)


def _empty_function_caches(modules: Any) -> None:
    classes = {cls for module in modules for cls in type(module).__mro__ if cls.__module__ not in _UNCACHED}
    owners: list[Any] = [*classes, *(sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules)]
    for owner in owners:
        for value in list(vars(owner).values()):
            function = getattr(value, "__func__", value)
            for candidate in (function, getattr(function, "__wrapped__", None), *_closure(function)):
                clear = getattr(candidate, "cache_clear", None)
                if callable(clear) and getattr(candidate, "__module__", None) == getattr(
                    owner, "__module__", owner.__name__
                ):
                    clear()


def _closure(function: Any) -> list[Any]:
    """What a decorated function refers to: diffusers hides an lru_cache in the closure of a wrapper."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _filled(cell)]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


_UNCACHED = {"builtins", "torch.nn.modules.module"}
