"""One call of a transformer on its way through the stages, as one rank sees it, and what runs such calls."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.lowering.stage import StageModule
from dit_pipelining.runtime.step_states import StepCall
from dit_pipelining.torch_internals import version


class StageFailedError(RuntimeError):
    """The stage of this rank raised; the cause is attached."""


@dataclass(eq=False)
class StageCall:
    """One call of the transformer on this rank.

    Attributes:
        stage: this rank's.
        graph: the captured forward.
        leaves: the call's inputs by path; empty once the stage has run.
        replica: which of the replicas runs it.
        results: buffers for the output tensors, on every rank.
        versions: of the inputs that must not be written to meanwhile: path, tensor, its version at the start.
        state: what the thing that runs the call notes about it.
        steps: where modules find what they keep from step to step, if they do.
    """

    stage: StageModule
    graph: BlockGraph
    leaves: dict[str, Any]
    replica: int
    results: list[torch.Tensor]
    versions: list[tuple[str, torch.Tensor, int]]
    state: Any = None
    steps: StepCall | None = None

    def run(self, received: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the stage on what the stage before sent."""
        with nullcontext() if self.steps is None else self.steps.entered(self.stage.model):
            return self.stage.run(self.graph, received, self.leaves)

    def check_inputs_unchanged(self) -> None:
        """Raise if somebody has written to an input since the call began.

        Raises:
            StageFailedError: names the input.
        """
        for path, tensor, before in self.versions:
            if version(tensor) != before:
                raise StageFailedError(
                    f"the input {path!r} was changed in place while the call was in flight. Use "
                    'ParallelConfig(schedule="gpipe"), which runs each call before it returns.'
                )


class StageRunner(Protocol):
    """Runs this rank's part of calls: receive, run the stage, send on, share the result."""

    error: BaseException | None

    def submit(self, call: StageCall) -> None:
        """Start a call. All ranks submit the same calls in the same order, also those whose replica does not run it."""

    def wait(self, call: StageCall) -> None:
        """Return when the results are there for the current stream (on CUDA) or the host (on the CPU)."""

    def run_aside(self, function: Callable[[], None]) -> None:
        """Run a function in this rank's order of calls, where its stage would run."""

    def drain(self) -> None:
        """Return when no stage of an earlier call runs Python code any more."""

    def stop(self, error: BaseException) -> None:
        """Run nothing more, since the run has failed here or elsewhere, and end waits that no process group ends."""

    def seconds_unfinished(self) -> float:
        """For how long the oldest call has been in flight, where no wait on the host would time out; else 0."""

    def close(self) -> None:
        """Finish what is in flight, unless there was an error."""
