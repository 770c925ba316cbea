"""The thread that runs this rank's stage, one call after the other, while the pipeline's own code goes on.

[Note: order of communication]
For call k = 0, 1, ... a rank issues recv(k), stage(k), send(k), result(k), in this order, and nothing of call k waits for
anything of a later call. Receives, stages and sends are the worker's, so each link has one posting thread on each side;
the result is posted by the rank that gives it from the worker, and by the others from the thread that submits. The receive
of call k + 1 is posted before stage k runs, so that data travels during the computation; with that, two calls' buffers
exist at a time.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.comm.links import ReplicaLinks
from dit_pipelining.lowering.stage import StageModule
from dit_pipelining.torch_internals import autocast_state, version

SENDS_IN_FLIGHT = 8
"""Sends that may be unfinished: gloo keeps a sent tensor until its work is waited for, and polling it leaks."""

SECONDS_TO_LEAVE = 60.0
"""How long a rank that leaves waits for its last transfers: another rank may have failed and never take them."""


class StageFailedError(RuntimeError):
    """The stage of this rank raised; the cause is attached."""


@dataclass(eq=False)
class StageCall:
    """One call of the transformer on this rank.

    Attributes:
        stage: that runs it.
        graph: the captured forward.
        leaves: the call's inputs by path.
        links: of the replica that runs it.
        results: buffers for the output tensors; the root's stage fills and sends them.
        done: set when the stage has run here (and, on the root, the result has been sent on its way).
        error: what the stage raised.
    """

    stage: StageModule
    graph: BlockGraph
    leaves: dict[str, Any]
    links: ReplicaLinks
    results: list[torch.Tensor]
    is_root: bool
    versions: list[tuple[str, torch.Tensor, int]]
    context: Callable[[], Any]
    ready: Any = None
    finished: Any = None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    buffers: list[torch.Tensor] = field(default_factory=list)
    receives: list[dist.Work] | None = None


class StageWorker:
    """Runs calls in the order they are submitted, on a stream of its own on CUDA.

    Args:
        device: of this rank.
        on_error: called in the worker's thread with what a stage raised, before the call is marked done.
    """

    def __init__(self, device: torch.device, on_error: Callable[[BaseException], None]) -> None:
        self.device = device
        self.on_error = on_error
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[StageCall | threading.Event | None] = queue.SimpleQueue()
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._thread = threading.Thread(target=self._work, name="stage", daemon=True)
        self._thread.start()

    def submit(self, call: StageCall) -> None:
        if self.stream is not None:
            call.ready = torch.cuda.current_stream(self.device).record_event()
        self._jobs.put(call)

    def drain(self) -> None:
        """Wait until everything submitted has run."""
        done = threading.Event()
        self._jobs.put(done)
        done.wait()

    def close(self) -> None:
        """Run what is left, finish all sends, end the thread. After an error nothing is waited for."""
        self._jobs.put(None)
        if self.error is None:
            self._thread.join(SECONDS_TO_LEAVE)

    def _work(self) -> None:
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            following: StageCall | threading.Event | None = None
            have = False
            while True:
                job = following if have else self._jobs.get()
                following, have = None, False
                if job is None:
                    break
                if isinstance(job, threading.Event):
                    job.set()
                    continue
                self._post_receives(job)
                with suppress(queue.Empty):
                    following, have = self._jobs.get_nowait(), True
                if isinstance(following, StageCall):
                    self._post_receives(following)
                self._run(job)
                del job
            while self._sends and self.error is None:
                self._sends.popleft()[0].wait()

    def _post_receives(self, call: StageCall) -> None:
        if call.receives is None and self.error is None:
            received = call.stage.received(call.graph)
            call.buffers = [torch.empty(v.wire_shape, dtype=v.dtype, device=self.device) for v in received]
            index = call.stage.stage_index
            try:
                call.receives = call.links.receive(index, call.buffers) if index else []
            except BaseException as error:
                self._fail(call, error)

    def _run(self, call: StageCall) -> None:
        try:
            if self.error is not None:
                raise StageFailedError("an earlier call failed on this rank") from self.error
            for work in call.receives or ():
                work.wait()
            if call.ready is not None:
                torch.cuda.current_stream(self.device).wait_event(call.ready)
            for path, tensor, before in call.versions:
                if version(tensor) != before:
                    raise StageFailedError(
                        f"the input {path!r} was changed in place while the call was in flight. Use "
                        'ParallelConfig(schedule="gpipe"), which runs each call before it returns.'
                    )
            with call.context():
                outputs = call.stage.run(call.graph, call.buffers, call.leaves)
            self._pass_on(call, outputs)
            if self.stream is not None:
                call.finished = self.stream.record_event()
        except BaseException as error:
            self._fail(call, error)
        finally:
            call.leaves, call.buffers, call.receives = {}, [], []
            call.done.set()

    def _pass_on(self, call: StageCall, outputs: Sequence[torch.Tensor]) -> None:
        index = call.stage.stage_index
        if call.is_root:
            for buffer, output in zip(call.results, outputs, strict=True):
                buffer.copy_(output)
            self._keep(call.links.share(call.results), call.results)
        elif index < call.stage.num_stages - 1:
            self._keep(call.links.send(index, outputs), outputs)

    def _keep(self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor]) -> None:
        self._sends.extend(zip(works, tensors, strict=True))
        while len(self._sends) > SENDS_IN_FLIGHT:
            self._sends.popleft()[0].wait()

    def _fail(self, call: StageCall, error: BaseException) -> None:
        call.error = error
        if self.error is None:
            self.error = error
            self.on_error(error)


def calling_context() -> Callable[[], Any]:
    """The caller's grad, inference and autocast state, to be entered in the worker's thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    states = [autocast_state("cpu")]
    if torch.cuda.is_available():
        states.append(autocast_state("cuda"))

    def enter() -> Any:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad and not inference))
        for device_type, enabled, dtype in states:
            if enabled:
                stack.enter_context(torch.autocast(device_type, dtype=dtype))
        return stack

    return enter
