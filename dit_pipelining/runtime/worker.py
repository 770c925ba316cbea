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
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from dit_pipelining.comm.cuda_streams import new_stream
from dit_pipelining.comm.links import ReplicaLinks, Work
from dit_pipelining.comm.sends import SECONDS_TO_LEAVE, Sends
from dit_pipelining.runtime.calls import StageCall, StageFailedError
from dit_pipelining.runtime.modes import calling_mode


@dataclass(eq=False)
class _Progress:
    """How far a call has come on this rank.

    Attributes:
        links: of the replica that runs it.
        shared: the broadcast of the result on its way here; empty on the rank that gives it.
        done: set when the stage has run here (and the rank that gives the result has sent it on its way).
        ready: on CUDA, when the inputs are.
        finished: on CUDA, when the stage is.
    """

    links: ReplicaLinks
    context: Callable[[], Any]
    shared: list[Work] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    buffers: list[torch.Tensor] = field(default_factory=list)
    receives: list[Work] | None = None
    ready: Any = None
    finished: Any = None


class StageWorker:
    """The StageRunner of ranks that are connected by process groups: a thread runs the calls, on CUDA on its own stream.

    Args:
        links: of all replicas.
        rank: of this process.
        device: of this rank.
        on_error: called in the worker's thread with what a stage raised, before the call is marked done.
    """

    def __init__(
        self,
        links: Sequence[ReplicaLinks],
        rank: int,
        device: torch.device,
        on_error: Callable[[BaseException], object],
    ) -> None:
        self.links = links
        self.rank = rank
        self.device = device
        self.on_error = on_error
        self.stream = new_stream(device) if device.type == "cuda" else None
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[StageCall | Callable[[], None] | None] = queue.SimpleQueue()
        self._sends = Sends()
        self._ran: threading.Event | None = None
        self._thread = threading.Thread(target=self._work, name="stage", daemon=True)
        self._thread.start()

    def submit(self, call: StageCall) -> None:
        if self.error is not None:
            raise StageFailedError("a stage failed on this rank; nothing can go on") from self.error
        links = self.links[call.replica]
        call.state = progress = _Progress(links, calling_mode())
        if self.rank in links.ranks:
            if self.stream is not None:
                progress.ready = torch.cuda.current_stream(self.device).record_event()
            self._jobs.put(call)
        if links.root != self.rank:
            progress.shared = links.share(call.results)

    def wait(self, call: StageCall) -> None:
        progress: _Progress = call.state
        try:
            for work in progress.shared:
                work.wait()
        except RuntimeError as error:
            raise (self.error or error) from None
        if progress.links.root != self.rank:
            return
        progress.done.wait()
        if progress.error is not None:
            raise progress.error
        if progress.finished is not None:
            torch.cuda.current_stream(self.device).wait_event(progress.finished)

    def run_aside(self, function: Callable[[], None]) -> None:
        """Run a function in the worker's thread when everything submitted so far has run."""

        def run() -> None:
            if self.error is not None:
                return
            try:
                with torch.no_grad():
                    function()
            except BaseException as error:
                self.error = error
                self.on_error(error)

        self._jobs.put(run)

    def drain(self) -> None:
        """Wait until everything submitted has run."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def stop(self, error: BaseException) -> None:
        self.error = self.error or error  # its groups' waits are ended with those of all groups

    def seconds_unfinished(self) -> float:
        return 0.0

    def close(self) -> None:
        """Run what is left, finish all sends, end the thread. After an error nothing is waited for."""
        self._jobs.put(None)
        # The thread itself may be the one that collects what nobody uses any more.
        if self.error is None and threading.current_thread() is not self._thread:
            self._thread.join(SECONDS_TO_LEAVE)

    def _work(self) -> None:
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            job = self._jobs.get()
            while job is not None:
                following: StageCall | Callable[[], None] | None = None
                have = False
                if not isinstance(job, StageCall):
                    self._tell_done()
                    job()
                else:
                    self._post_receives(job)
                    with suppress(queue.Empty):
                        following, have = self._jobs.get_nowait(), True
                    if isinstance(following, StageCall):
                        self._post_receives(following)
                    self._run(job)
                if have:
                    job = following
                    continue
                self._tell_done()
                job = following = None  # while this waits, it keeps neither a call nor its model alive
                job = self._jobs.get()
            self._tell_done()
            self._sends.finish(lambda: self.error is not None)

    def _tell_done(self) -> None:
        """Let go of the call that has run last, and wake the one that waits for it."""
        if self._ran is not None:
            self._ran.set()
            self._ran = None

    def _post_receives(self, call: StageCall) -> None:
        progress: _Progress = call.state
        if progress.receives is None and self.error is None:
            received = call.stage.received(call.graph)
            progress.buffers = [torch.empty(v.wire_shape, dtype=v.dtype, device=self.device) for v in received]
            index = call.stage.stage_index
            try:
                progress.receives = progress.links.receive(index, progress.buffers) if index else []
            except BaseException as error:
                self._fail(progress, error)

    def _run(self, call: StageCall) -> None:
        progress: _Progress = call.state
        try:
            if self.error is not None:
                raise StageFailedError("an earlier call failed on this rank") from self.error
            self._tell_done()  # not earlier: whoever wakes up would take the interpreter from the next call's preparation
            for work in progress.receives or ():
                work.wait()
            if progress.ready is not None:
                torch.cuda.current_stream(self.device).wait_event(progress.ready)
            call.check_inputs_unchanged()
            with progress.context():  # in the caller's inference mode its buffers are written to in that mode only
                self._pass_on(call, call.run(progress.buffers))
            if self.stream is not None:
                progress.finished = self.stream.record_event()
        except BaseException as error:
            self._fail(progress, error)
        finally:
            call.leaves, progress.buffers, progress.receives = {}, [], []
            self._tell_done()
            self._ran = progress.done

    def _pass_on(self, call: StageCall, outputs: Sequence[torch.Tensor]) -> None:
        index, links = call.stage.stage_index, call.state.links
        if links.root == self.rank:
            for buffer, output in zip(call.results, outputs, strict=True):
                buffer.copy_(output)
            self._keep(links.share(call.results), call.results)
        elif index < call.stage.num_stages - 1:
            self._keep(links.send(index, outputs), outputs)

    def _keep(self, works: Sequence[Work], tensors: Sequence[torch.Tensor]) -> None:
        for work, tensor in zip(works, tensors, strict=True):
            self._sends.keep(work, tensor)

    def _fail(self, progress: _Progress, error: BaseException) -> None:
        progress.error = error
        if self.error is None:
            self.error = error
            self.on_error(error)
