"""The calls that one tile of a VAE takes, noted down so that any rank can make them."""

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dit_pipelining.torch_internals import tree_flatten, tree_map, version

FUNCTIONS: dict[str, Callable[..., Any]] = {"torch.cat": torch.cat, "operator.getitem": operator.getitem}
"""What is noted down beside calls of parts."""


@dataclass(frozen=True)
class Result:
    """What a step of the same job gives: all of it, or one element of the tuple."""

    step: int
    element: int | None = None

    def shifted(self, count: int) -> "Result":
        """The same when so many steps come before."""
        return Result(self.step + count, self.element)


@dataclass(frozen=True)
class Step:
    """One call: of a part of the VAE, by its name, or of one of `FUNCTIONS`. Arguments hold `Result`s."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def results(self) -> list[Result]:
        """What it uses."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Result)]

    def filled(self, value_of: Callable[[Result], Any]) -> "Step":
        """With what it uses in place; a list that holds nothing of it stays the same object, since calls write to it."""

        def fill(value: Any) -> Any:
            if not any(isinstance(leaf, Result) for leaf in tree_flatten(value)[0]):
                return value
            return tree_map(lambda leaf: value_of(leaf) if isinstance(leaf, Result) else leaf, value)

        return Step(self.target, tuple(map(fill, self.args)), {key: fill(value) for key, value in self.kwargs.items()})

    def shifted(self, count: int) -> "Step":
        """The same when so many steps come before."""
        return self.filled(lambda result: result.shifted(count))


class Holder(Protocol):
    """What the VAE's code holds in place of a result."""

    job: "Job"
    result: Result


@dataclass(eq=False)
class Job:
    """The calls that one tile takes.

    Attributes:
        steps: in order.
        cost: number of elements that go in; convolutions take time in proportion to it.
        lists: those that its calls may write to.
        tensors: that go in, with their version.
        values: what it gave, by result; None as long as it has not run.
        ran_here: on this rank.
    """

    steps: list[Step] = field(default_factory=list)
    cost: int = 0
    lists: list[Any] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    values: dict[Result, Any] | None = None
    ran_here: bool = False
    _holders: list[tuple[weakref.ref[Holder], bool]] = field(default_factory=list)

    def add(self, step: Step, lists: Sequence[Any]) -> None:
        """One more call, which writes to these lists."""
        self.steps.append(step)
        self.lists += [value for value in lists if not any(value is known for known in self.lists)]
        for leaf in tree_flatten((step.args, step.kwargs))[0]:
            if isinstance(leaf, torch.Tensor):
                self.cost += leaf.numel()
                self.tensors.append((leaf, version(leaf)))

    def append(self, other: "Job") -> None:
        """Go on with the calls of another job, which ends to be one."""
        first = len(self.steps)
        for step in other.steps:
            self.add(step.shifted(first), other.lists)
        for reference, travels in other._holders:
            holder = reference()
            if holder is not None:
                holder.job, holder.result = self, holder.result.shifted(first)
                self.hold(holder, travels=travels)

    def wanted(self) -> list[Result]:
        """Results that the VAE's code still holds, without those that stay where they are."""
        return self._held(travels=True)

    def kept(self) -> list[Result]:
        """Results that the VAE's code still holds to hand them to a later call."""
        return self._held(travels=False)

    def give(self, values: dict[Result, Any], *, here: bool) -> None:
        """Take the results, and let go of what went in."""
        self.values, self.ran_here = values, here
        self.steps, self.tensors = [], []
        if here:
            self.lists = []

    def hold(self, holder: Holder, *, travels: bool) -> None:
        """Note who refers to a result as long as it lives, and whether the result goes to the rank where it is used."""
        self._holders.append((weakref.ref(holder), travels))

    def _held(self, *, travels: bool) -> list[Result]:
        alive = [reference() for reference, own in self._holders if own == travels]
        return [holder.result for holder in alive if holder is not None]


def run_steps(
    steps: Sequence[Step], wanted: Sequence[Result], parts: Mapping[str, Callable[..., Any]]
) -> dict[Result, Any]:
    """Compute a job.

    Args:
        steps: of the job.
        wanted: results to return.
        parts: of the VAE, by name.
    """
    last_use = {result: number for number, step in enumerate(steps) for result in step.results()}
    values: dict[Result, Any] = {}
    for number, step in enumerate(steps):
        call = step.filled(values.__getitem__)
        output = {**FUNCTIONS, **parts}[step.target](*call.args, **call.kwargs)
        for result in {*last_use, *wanted}:
            if result.step == number:
                values[result] = output if result.element is None else output[result.element]
        del call, output
        for result in step.results():
            if last_use[result] == number and result not in wanted:
                values.pop(result, None)
    return values
