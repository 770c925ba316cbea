"""Replay what a stage does for one captured graph as a CUDA graph: one launch in place of one per kernel.

Worth it where the GPU is done with a kernel before the host has launched the next one: a Wan 1.3B on one latent frame (1,560
tokens) has 6 ms of arithmetic in 56 ms of launches.
"""

import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dit_pipelining.capture.code import Function
from dit_pipelining.capture.kept import has_state, module_state, parts_at
from dit_pipelining.torch_internals import version

WARM_UPS = 2
"""Plain runs before a recording, in which kernels are loaded and compiled, and libraries choose and allocate."""


@dataclass(eq=False)
class GraphedFunction:
    """A function of a stage that is recorded once per layout of its arguments and replayed from then on.

    Arguments are copied into the buffers that the recording read, unless they are the very tensors that were copied last;
    results are copied out. A recording is dropped when a weight has moved or an adapter's scale has changed, since it holds
    addresses and numbers. What takes objects (caches), and what runs on the CPU, is run plainly.

    Attributes:
        function: as `compile_nodes` makes it.
        weights: names of the modules, parameters and buffers it uses, looked up on the root it runs on.
        form: what else a recording is made for: state outside of the arguments that decides which kernels run, and where.
            None: this call cannot be recorded or replayed.
    """

    function: Function
    weights: tuple[str, ...]
    form: Callable[[], Hashable | None] = tuple
    _recordings: dict[Hashable, "_Recording"] = field(default_factory=dict)
    _runs: dict[Hashable, int] = field(default_factory=dict)
    _cannot: set[Hashable] = field(default_factory=set)

    def __call__(self, root: nn.Module, *arguments: Any) -> tuple[Any, ...]:
        layout, form = _layout(arguments), self.form()
        if layout is None or form is None or torch.is_grad_enabled():
            return self.function(root, *arguments)
        key = layout, form
        known = self._recordings.get(key)
        if known is not None and known.weights.unchanged():
            return known.replay(arguments)
        self._recordings.pop(key, None)
        self._runs[key] = self._runs.get(key, 0) + 1
        if self._runs[key] <= WARM_UPS or key in self._cannot:
            return self.function(root, *arguments)
        try:
            known = _Recording(self.function, root, arguments, _Weights(root, self.weights))
        except RuntimeError as error:
            self._cannot.add(key)
            warnings.warn(f"a stage cannot be recorded as a CUDA graph and runs plainly: {error}", stacklevel=2)
            return self.function(root, *arguments)
        self._recordings[key] = known
        return known.replay(arguments)

    def drop(self) -> None:
        """Forget all recordings: what they read lies elsewhere from now on."""
        self._recordings.clear()
        self._runs.clear()


class _Recording:
    def __init__(self, function: Function, root: nn.Module, arguments: tuple[Any, ...], weights: "_Weights") -> None:
        self.weights = weights
        self._graph = torch.cuda.CUDAGraph()
        # Not inference tensors: those could not be written to outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._buffers = [_like(own) if isinstance(own, torch.Tensor) else own for own in arguments]
        self._last: list[tuple[weakref.ref[torch.Tensor], int] | None] = [None] * len(arguments)
        self._take_in(arguments)
        # Other threads may use CUDA meanwhile (a progress display does not, a user's code may).
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = function(root, *self._buffers)

    def replay(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self._take_in(arguments)
        self._graph.replay()
        return tuple(own.clone() if isinstance(own, torch.Tensor) else own for own in self._results)

    def _take_in(self, arguments: tuple[Any, ...]) -> None:
        for i, (buffer, own) in enumerate(zip(self._buffers, arguments, strict=True)):
            if not isinstance(own, torch.Tensor):
                continue
            now, last = version(own), self._last[i]
            if last is not None and last[0]() is own and last[1] == now >= 0:
                continue
            buffer.copy_(own)
            self._last[i] = weakref.ref(own), now


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _layout(arguments: Iterable[Any]) -> Hashable:
    """What a recording is made for; None where the arguments cannot be copied into buffers."""
    layouts: list[Hashable] = [torch.is_inference_mode_enabled()]
    for own in arguments:
        if isinstance(own, torch.Tensor):
            if type(own) not in (torch.Tensor, nn.Parameter) or own.device.type != "cuda":
                return None
            layouts.append((tuple(own.shape), own.stride(), own.dtype))
        elif own is None or isinstance(own, bool | int | float | str):
            layouts.append((type(own), own))
        else:
            return None
    return tuple(layouts)


class _Weights:
    """Where the weights lay, and what modules there were, when a recording was made. Asked at every call, so kept flat."""

    def __init__(self, root: nn.Module, names: tuple[str, ...]) -> None:
        modules = [part for name in names for part in parts_at(root, name)]
        self._children = [(module._modules, tuple(module._modules.values())) for module in modules if module._modules]
        self._places: list[tuple[Mapping[str, Any], str, torch.Tensor, int]] = []
        for module in modules:
            for tensors in (module._parameters, module._buffers):
                self._note(tensors, tensors)
        for path, _, key in (name.rpartition(".") for name in names):
            owner = root.get_submodule(path)
            for tensors in (owner._parameters, owner._buffers):
                self._note(tensors, [key] if key in tensors else [])
        self._stateful = [module for module in modules if has_state(module)]
        self._state = module_state(self._stateful)

    def unchanged(self) -> bool:
        return (
            all(own is tensors.get(name) and own.data_ptr() == place for tensors, name, own, place in self._places)
            and all(tuple(children.values()) == before for children, before in self._children)
            and module_state(self._stateful) == self._state
        )

    def _note(self, tensors: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            tensor = tensors[name]
            if tensor is not None:
                self._places.append((tensors, name, tensor, tensor.data_ptr()))
