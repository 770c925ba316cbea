"""What one stage hands to the next: tensors by name, perhaps still on their way."""

from collections.abc import Callable, ItemsView, KeysView, Sequence
from typing import Any, Protocol

import torch


class Handle(Protocol):
    """A transfer that can be waited for: torch's `Work`, or a message of `mixins.messages`."""

    def wait(self) -> Any: ...


class IntermediateTensors:
    """What a stage's forward returns unless it is the last: the tensors that the next stage continues from.

    `tensors["hidden_states"]` gives one tensor; a slice, such as `tensors[:8]`, cuts each along its first dimension.

    Args:
        tensors: by name, such as `{"hidden_states": (batch, tokens, dim)}`.
    """

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def __getitem__(self, key: str | slice) -> Any:
        if isinstance(key, slice):
            return IntermediateTensors({name: tensor[key] for name, tensor in self.tensors.items()})
        return self.tensors[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.tensors[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self.tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def keys(self) -> KeysView[str]:
        return self.tensors.keys()

    def items(self) -> ItemsView[str, Any]:
        return self.tensors.items()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntermediateTensors):
            return NotImplemented
        ours, theirs = self.tensors, other.tensors
        return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

    __hash__ = None  # type: ignore[assignment]  # it is compared by its contents, which change

    def __repr__(self) -> str:
        shapes = {name: tuple(tensor.shape) if hasattr(tensor, "shape") else tensor for name, tensor in self.items()}
        return f"{type(self).__name__}({shapes})"


class AsyncIntermediateTensors(IntermediateTensors):
    """Intermediate tensors that are still being received; the first look at them waits.

    Args:
        tensors: by name; complete once the handles are waited for and the steps afterwards are done.
        comm_handles: transfers to wait for, in order.
        comm_postprocess: what to call after that, in order.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        comm_handles: Sequence[Handle] | None = None,
        comm_postprocess: Sequence[Callable[[], Any]] | None = None,
    ) -> None:
        self._received = tensors
        self._handles = list(comm_handles or ())
        self._steps_after = list(comm_postprocess or ())

    def wait_for_comm(self) -> None:
        """Wait for what has not been waited for yet."""
        settle(self._handles, self._steps_after)

    @property
    def tensors(self) -> dict[str, Any]:  # type: ignore[override]
        self.wait_for_comm()
        return self._received


def settle(handles: list[Handle], steps_after: list[Callable[[], Any]]) -> None:
    """Wait for each handle and call each step, once: both lists are empty afterwards."""
    while handles:
        handles.pop(0).wait()
    while steps_after:
        steps_after.pop(0)()
