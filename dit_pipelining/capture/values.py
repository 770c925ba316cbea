"""Answers to questions about values while a forward is recorded, from the real inputs.

[Note: questions]
Glue looks at values now and then: the length of a text mask, whether an image embedding is all zeros, `nonzero`. Such a
question is answered by running the few nodes behind it on the real inputs of the call. The captured graph is then right
for every call whose inputs give the same answers, so the questions are kept with the graph and asked again of later
inputs (once per input tensor, see kept.py). Of a result that is a tensor only the shape counts: its values are computed
by the graph anyway. Latents, timesteps and guidance change at every step, so questions about them are refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from dit_pipelining.capture import replay
from dit_pipelining.capture.kept import KeptFunction
from dit_pipelining.capture.record import Record
from dit_pipelining.capture.structure import map_tensors, tensors_in
from dit_pipelining.torch_internals import real_tensors

CHANGES_EACH_STEP = re.compile(r"timestep|sigma|guidance|(^|_)t$")
"""Names of inputs that are new at every denoising step, beside the latents."""


class ValueNeededError(Exception):
    """A value is needed that must not or cannot be known; says which."""


@dataclass(frozen=True, eq=False)
class Questions:
    """What glue asked about one set of inputs, and the answers a graph was captured with."""

    kept: KeptFunction
    answers: tuple[Any, ...]

    def same_answers(self, model: nn.Module, leaves: Mapping[str, Any]) -> bool:
        with torch.no_grad():
            results = self.kept.get(model, leaves)
        return all(summary(result) == answer for result, answer in zip(results, self.answers, strict=True))


def summary(result: Any) -> Any:
    """What of an answer a graph depends on, made of parts that `==` compares: of tensors the shape, of all else the value.

    Types belong to it (`1 == True`); arrays and floating-point numbers are compared by their bits and their text, since
    `==` is no truth value of the former and never true of NaN.
    """
    if isinstance(result, torch.Tensor):
        return torch.Tensor, tuple(result.shape), result.dtype
    if isinstance(result, np.ndarray | np.generic):
        if result.dtype.hasobject:
            return type(result), result.shape, summary(result.tolist())
        return type(result), result.shape, result.dtype.str, result.tobytes()
    if isinstance(result, float | complex):
        return type(result), repr(result)
    if isinstance(result, list | tuple):
        return type(result), [summary(item) for item in result]
    if isinstance(result, dict):
        return type(result), [(summary(name), summary(item)) for name, item in result.items()]
    return type(result), result


class Values:
    """Real values of what has been recorded so far, computed on demand."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._known: dict[fx.Node, Any] = {}
        self._random: torch.Generator | None = None

    def answer(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `func` on real values; tensors in the result are fake again.

        Where one argument's values are known and another's are not (`x[mask]`, `x.reshape(1, height, -1)` with tensors
        as sizes), the shape of the result depends on the known one, and zeros stand in for the other.

        Raises:
            ValueNeededError: an argument depends on what must not be asked about.
        """
        blanks: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        some_known = any(self.is_known(tensor) for tensor in tensors_in((args, kwargs)))

        def real(tensor: torch.Tensor) -> Any:
            try:
                return self.value_of(self.record.node_of(tensor))
            except ValueNeededError:
                if not some_known or not tensor.is_floating_point():
                    raise
                like = (tuple(tensor.shape), tensor.dtype, tensor.device)
                blanks[id(tensor)] = tensor, self.record.graph.call_function(replay.blank, like)
                return replay.blank(*like)

        with real_tensors(), torch.no_grad():
            result = func(*map_tensors(real, args), **map_tensors(real, kwargs))
        operation, call_args = replay.as_node_call(func, args)
        with self.record.known_as(blanks):
            question = self.record.create(operation, call_args, kwargs)
        self.record.asked.append((question, summary(result)))
        return map_tensors(self.record.fake, result)

    def is_known(self, tensor: torch.Tensor) -> bool:
        try:
            self.value_of(self.record.node_of(tensor))
        except ValueNeededError:
            return False
        return True

    def value_of(self, node: fx.Node) -> Any:
        """The real value of a recorded node.

        Raises:
            ValueNeededError: the node depends on something that must not be asked about.
        """
        if node not in self._known:
            with real_tensors(), torch.no_grad():
                self._known[node] = self._compute(node)
        return self._known[node]

    def _compute(self, node: fx.Node) -> Any:
        record = self.record
        if self.standing_in and "shape" in node.meta and node.meta["dtype"].is_floating_point:
            return self._random_like(node)
        if node.op == "placeholder":
            return self._input(node.meta["input"])
        if node.op == "get_attr":
            target = str(node.target)
            value = record.constants[target] if target in record.constants else record.originals[target]
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                raise ValueNeededError(f"the values of {target!r}, which is not loaded")
            return value
        if node.op == "call_module":
            raise ValueNeededError(f"the output of the module {node.target!r}")
        inputs = {source: self.value_of(source) for source in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _input(self, path: str) -> Any:
        value = self.record.inputs.leaves[path]
        if not isinstance(value, torch.Tensor):
            raise ValueNeededError(f"what is inside the object {path!r}")
        if value.device.type == "meta":
            raise ValueNeededError(
                f"the values of the input {path!r}, which was given without values (on the meta device)"
            )
        name = path.split(".")[0]
        if name == self.record.main_input or CHANGES_EACH_STEP.search(name):
            raise ValueNeededError(f"the values of the input {path!r}, which changes at every step")
        return value.clone()

    def with_real_closure(self, function: Any) -> Any:
        """A copy of a Python function whose closure holds real tensors; their values count as answers."""
        cells = function.__closure__ or ()
        return FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(CellType(self._real_content(cell.cell_contents)) for cell in cells),
        )

    def _real_content(self, content: Any) -> Any:
        if isinstance(content, FunctionType):
            return self.with_real_closure(content)

        def real(tensor: torch.Tensor) -> Any:
            self.answer(torch.Tensor.tolist, (tensor,), {})
            return self.value_of(self.record.node_of(tensor))

        return map_tensors(real, content)

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Inside this context unknown floating-point values are random ones, and questions are not kept.

        For the inner code of a block that looks at values, such as the routing of tokens to experts: only the shape of
        the block's output matters, and the block itself runs on real values later.
        """
        asked, known = list(self.record.asked), dict(self._known)
        self._random = torch.Generator().manual_seed(0)
        try:
            yield
        finally:
            self.record.asked, self._known, self._random = asked, known, None

    @property
    def standing_in(self) -> bool:
        return self._random is not None

    def _random_like(self, node: fx.Node) -> torch.Tensor:
        value = torch.rand(node.meta["shape"], generator=self._random)
        return value.to(node.meta["device"], node.meta["dtype"])
