"""Runs this rank's stage on a CUDA stream of its own, where peer copies connect the ranks.

Everything is given to the GPU when the call is submitted, waits for other ranks included (see [Note: peer copies] in
comm/peer_channels.py), so no host waits for another one, and none for its GPU, however many calls are in flight.

[Note: memory of several streams]
A tensor that another stream than its own works on must not be freed before that work is done. `Tensor.record_stream` would
see to it, but then torch's allocator asks for the events of all such tensors whenever it is asked for memory, which in a
stage is hundreds of times per call. So the tensors of a call are held here until its work is done, which is looked at once
per call; what goes to the next stage, which is large, is not among them (comm/outbox.py).

[Note: the thread of the stage]
What torch prepares for a kernel it keeps per thread: handles of cuBLAS and cuDNN, plans of cuDNN's attention and of its
convolutions. Each request has a thread of its own, so a stage that ran there would prepare everything again at the first
call of every request, 90 to 380 ms during which the stages after it have nothing to do. So one thread runs the stage for
all of them, and the caller waits for it, which takes some 50 us.

Streams: `compute` runs the stage, `outgoing` copies to other ranks what it gave, and one stream per replica takes in the
results. The caller's own stream waits where it uses a result.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import torch

from dit_pipelining.comm.cuda_streams import new_stream
from dit_pipelining.comm.outbox import Outbox
from dit_pipelining.comm.peer_channels import slot_bytes
from dit_pipelining.comm.peer_links import PeerLinks
from dit_pipelining.runtime.calls import StageCall, StageFailedError
from dit_pipelining.runtime.modes import calling_mode


class StageStreams:
    """The StageRunner of ranks that have a GPU each on one host.

    Args:
        links: to the other ranks.
        device: this rank's GPU.
        on_error: called with what the stage raised, before it is raised.
    """

    def __init__(self, links: PeerLinks, device: torch.device, on_error: Callable[[BaseException], object]) -> None:
        self.links = links
        self.device = device
        self.on_error = on_error
        self.error: BaseException | None = None
        self.compute = new_stream(device)
        self.outgoing = new_stream(device, priority=-1)
        self.arrivals = [new_stream(device, priority=-1) for _ in range(links.mesh.replicas)]
        self._outbox = Outbox()
        self._thread = ThreadPoolExecutor(1, "stage")
        self._unfinished: deque[tuple[torch.cuda.Event, Any]] = deque()
        self._held: list[deque[tuple[torch.cuda.Event, Any]]] = [deque() for _ in range(links.mesh.replicas + 1)]

    def submit(self, call: StageCall) -> None:
        if self.error is not None:
            raise StageFailedError("an earlier call failed on this rank") from self.error
        mesh = self.links.mesh
        messages = call.stage.messages(call.graph)
        self.links.reserve(
            max(map(slot_bytes, messages), default=0), slot_bytes([tensor.nbytes for tensor in call.results])
        )
        ready = torch.cuda.current_stream(self.device).record_event()
        call.state = None
        if call.replica == mesh.replica:
            computed = self._thread.submit(self._run_as, calling_mode(), call, ready).result()
            if mesh.stage == mesh.pipeline_size - 1:
                call.state = computed
        if call.state is None:
            call.state = self._take_in(call, ready)
        call.leaves = {}
        self._unfinished.append((call.state, monotonic()))
        for waiting in (self._unfinished, *self._held):
            while waiting and waiting[0][0].query():
                waiting.popleft()

    def wait(self, call: StageCall) -> None:
        if self.error is not None:
            raise StageFailedError("an earlier call failed on this rank") from self.error
        call.check_inputs_unchanged()
        torch.cuda.current_stream(self.device).wait_event(call.state)

    def run_aside(self, function: Callable[[], None]) -> None:
        """Run a function on the stage's stream, after everything submitted so far."""

        def run() -> None:
            with torch.cuda.stream(self.compute), torch.no_grad():
                function()

        self._thread.submit(run).result()

    def drain(self) -> None:
        """Nothing to do: stages run Python code in `submit` only."""

    def stop(self, error: BaseException) -> None:
        self.error = self.error or error
        self.links.release_waits()

    def close(self) -> None:
        self._thread.shutdown(wait=False)
        if self.error is None:
            torch.cuda.synchronize(self.device)

    def seconds_unfinished(self) -> float:
        """For how long the oldest unfinished call has been in flight."""
        for event, started in list(self._unfinished):
            if not event.query():
                return float(monotonic() - started)
        return 0.0

    def _run_as(self, context: Callable[[], Any], call: StageCall, ready: torch.cuda.Event) -> torch.cuda.Event:
        with context():
            return self._run(call, ready)

    def _run(self, call: StageCall, ready: torch.cuda.Event) -> torch.cuda.Event:
        links, stage = self.links, call.stage
        with torch.cuda.stream(self.compute):
            self.compute.wait_event(ready)
            received: Sequence[torch.Tensor] = ()
            if links.incoming is not None:
                layouts = [(value.wire_shape, value.dtype) for value in stage.received(call.graph)]
                # Copies: a cache or somebody's hook may keep what a module is given, and the slot is free at once.
                received = [tensor.clone() for tensor in links.incoming.receive(layouts, self.compute)]
                links.incoming.release(self.compute)
            try:
                outputs = call.run(received)
            except BaseException as error:
                self._fail(error)
                raise
            with torch.no_grad():
                if links.outgoing is not None:
                    leaving = self._outbox.put(outputs, self.compute)
                else:
                    leaving = call.results
                    for buffer, output in zip(call.results, outputs, strict=True):
                        buffer.copy_(output)
            computed = self.compute.record_event()
        with torch.cuda.stream(self.outgoing), torch.no_grad():
            self.outgoing.wait_event(computed)
            for channel in links.results_to if links.outgoing is None else [links.outgoing]:
                channel.send(leaving, self.outgoing)
            sent = self.outgoing.record_event()
            if links.outgoing is not None:
                self._outbox.sent(sent)
            self._held[-1].append((sent, [*call.leaves.values(), *call.results]))
        return computed

    def _take_in(self, call: StageCall, ready: torch.cuda.Event) -> torch.cuda.Event:
        stream, channel = self.arrivals[call.replica], self.links.results_from[call.replica]
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(ready)  # the buffers' memory may still be in use there
            layouts = [(tensor.shape, tensor.dtype) for tensor in call.results]
            for buffer, arrived in zip(call.results, channel.receive(layouts, stream), strict=True):
                buffer.copy_(arrived)
            channel.release(stream)
            arrived = stream.record_event()
        self._held[call.replica].append((arrived, [*call.results]))
        return arrived

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self.on_error(error)
