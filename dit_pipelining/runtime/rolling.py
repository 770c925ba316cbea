"""The rolling schedule: calls in flight on a line of stages, results that are waited for when they are used."""

import atexit
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.signature import CallInputs
from dit_pipelining.comm.cuda_streams import new_stream
from dit_pipelining.comm.failure import Guard
from dit_pipelining.comm.layout import CALLERS
from dit_pipelining.comm.links import make_links
from dit_pipelining.comm.mesh import Mesh, line_group, new_group
from dit_pipelining.comm.peer_links import PeerLinks
from dit_pipelining.lowering.stage import StageModule
from dit_pipelining.runtime.agreement import agree
from dit_pipelining.runtime.calls import StageCall, StageRunner
from dit_pipelining.runtime.lockstep import Lockstep
from dit_pipelining.runtime.pending import PendingTensor, pending
from dit_pipelining.runtime.sources import Arrival
from dit_pipelining.runtime.step_states import StepCall
from dit_pipelining.runtime.streams import StageStreams
from dit_pipelining.runtime.turns import Turns
from dit_pipelining.runtime.worker import StageWorker
from dit_pipelining.torch_internals import tree_flatten, version


class Rolling:
    """Runs calls of a pipeline's transformers; shared by all of them.

    Args:
        mesh: which rank plays which part.
        device: of this rank.
        timeout: of the process groups.
        guard: of this launch.
        transport: how data moves between the ranks, from `choose_transport`.

    Attributes:
        line_group: the ranks of this line for torch's schedules, which take the launch's own group where it is the whole.
        copies_group: a gloo group of the ranks with this rank's place in the data-parallel copies.
        control: a gloo group of the ranks of this line, for what the hosts tell each other.
        callers: a gloo group of the ranks that make the same calls, in this line and in those it shares them with.
        lockstep: of replicas whose ranks share sharded weights.
        between_calls: what every rank does before each call of the pipeline, while nothing is in flight.
        alike: what has to be the same on all ranks at each call of the pipeline, beside its arguments, by a name for it.
        unfinished: transfers of components that requests have left because another one failed, and their order.
    """

    def __init__(
        self, mesh: Mesh, device: torch.device, timeout: timedelta, guard: Guard, transport: str = "host"
    ) -> None:
        self.mesh = mesh
        self.device = device
        self.guard = guard
        self.transport = transport
        self.turns = Turns()
        self._free_streams: list[torch.cuda.Stream] = []
        self.unfinished: list[tuple[int, Callable[[], None]]] = []
        self._timeout = timeout.total_seconds()
        self.control = line_group(mesh, timeout)
        self.callers = self.control if mesh.callers == mesh.line else new_group(mesh.layout.groups(*CALLERS), timeout)
        self.line_group: dist.ProcessGroup | None = None
        if mesh.size < dist.get_world_size():
            gpus = device.type == "cuda"
            lines = mesh.in_all_lines(range(mesh.size))
            self.line_group = new_group(lines, timeout, "nccl") if gpus else self.control
        self.copies_group = new_group(mesh.layout.groups("data"), timeout)
        self.between_calls: list[Callable[[], None]] = []
        self.alike: dict[str, Callable[[], Sequence[str]]] = {}
        self.lockstep: Lockstep | None = None
        self.runner = self._make_runner(timeout, transport)
        guard.on_failure(self._stop)
        guard.on_beat(self._check_overdue)
        # A rank that leaves with a send on its way would fail the one that waits for it. Nothing here keeps a pipeline that
        # nobody uses any more: its groups have threads of their own.
        atexit.register(_close, weakref.ref(self))
        weakref.finalize(self, self.runner.close).atexit = False

    def submit(
        self, stage: StageModule, graph: BlockGraph, inputs: CallInputs, steps: StepCall | None = None
    ) -> tuple[list[PendingTensor], Arrival]:
        """Start one call; returns at once with the tensors of `graph.output_nodes`, pending.

        All ranks submit the same calls in the same order.
        """
        self.guard.check()
        self.guard.count_step()
        results = [
            torch.empty(node.meta["shape"], dtype=node.meta["dtype"], device=self.device) for node in graph.output_nodes
        ]
        # What a cache holds is on the ranks that filled it.
        replica = 0 if inputs.objects or graph.output_objects else self._next_replica(steps)
        leaves = inputs.leaves
        versions = []
        if replica == self.mesh.replica:
            for path, tensor in inputs.tensors.items():
                if graph.is_new_each_step(path):
                    leaves[path] = tensor.clone()  # pipelines write the next step's latents into the same memory
                elif (before := version(tensor)) >= 0:
                    versions.append((path, tensor, before))
        if self.lockstep is not None:
            self.lockstep.before(stage, graph, replica, self.runner.run_aside)
        call = StageCall(stage, graph, leaves, replica, results, versions, steps=steps)
        self.runner.submit(call)
        arrival = Arrival(lambda: self._wait(call))
        return pending(results, arrival), arrival

    @contextmanager
    def call(self, name: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """One call of a pipeline, or of several side by side, which every rank makes.

        Args:
            name: of what is called.
            arguments: those that were given, by name.

        Raises:
            InputError: the ranks were given different arguments.
            RemoteRankError: another rank failed first.
        """
        with self.guard.call(after_agreement=self.drain) as outermost:
            if outermost:
                agree(name, {**arguments, **self._alike()}, self.callers, self.device)
                if self.between_calls:
                    self.drain()
                for act in self.between_calls:
                    act()
            yield

    def _alike(self) -> dict[str, Sequence[str]]:
        found = {name: ask() for name, ask in self.alike.items()}
        return {name: value for name, value in found.items() if value}

    def run(self, functions: Sequence[Callable[[], Any]], in_flight: int | None = None) -> list[Any]:
        """Run functions that submit calls as requests side by side, each on a CUDA stream of its own; see `Turns.run`."""
        return self.turns.run([self.on_own_stream(function) for function in functions], in_flight)

    def drain(self) -> None:
        """Wait until no stage runs on this rank, and finish what failed requests have left on its way."""
        self._catch_up()
        self.runner.drain()
        for _, finish in sorted(self.unfinished, key=itemgetter(0)):
            finish()
        self.unfinished.clear()

    def close(self) -> None:
        """Finish what is in flight."""
        self._catch_up()
        self.runner.close()

    def _catch_up(self) -> None:
        if self.lockstep is not None and self.runner.error is None:
            self.lockstep.catch_up(self.runner.run_aside)

    def _make_runner(self, timeout: timedelta, transport: str) -> StageRunner:
        if transport == "peer":
            control = line_group(self.mesh, timeout)
            return StageStreams(PeerLinks(self.mesh, control, self.device), self.device, self.guard.fail)
        links = make_links(self.mesh, timeout, self.device, "nccl" if transport == "nccl" else None)
        return StageWorker(links, self.mesh.world_rank, self.device, self.guard.fail)

    def _next_replica(self, steps: StepCall | None) -> int:
        """Branches of a step go to different replicas, always the same ones, and so do requests."""
        request = self.turns.current()
        replica = (request.index + request.submitted) % self.mesh.replicas
        request.submitted += 1
        return replica if steps is None else steps.states.replicas.setdefault(steps.branch, replica)

    def _wait(self, call: StageCall) -> None:
        self.turns.end_turn()
        self._catch_up()
        try:
            self.runner.wait(call)
        except BaseException as error:
            raise self.guard.fail(error) from None

    def _stop(self, error: BaseException) -> None:
        self.turns.fail(error)
        self.runner.stop(error)

    def _check_overdue(self) -> str | None:
        seconds = self.runner.seconds_unfinished()
        if seconds < self._timeout:
            return None
        return (
            f"has had a call of a transformer in flight for {seconds:.0f} s (ParallelConfig.timeout_seconds): a rank hangs, "
            "or its stage takes longer."
        )

    def on_own_stream(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """The function on a CUDA stream of its own, and unchanged on the CPU.

        A request's own code waits for its own results only: on one stream it would wait for those of all requests.
        """
        if self.device.type != "cuda":
            return function
        caller = torch.cuda.current_stream(self.device)

        def run() -> Any:
            own = self._free_streams.pop() if self._free_streams else new_stream(self.device)
            own.wait_stream(caller)
            with torch.cuda.stream(own):
                result = function()
            caller.wait_stream(own)
            self._free_streams.append(own)
            for leaf in tree_flatten(result)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                    leaf.record_stream(caller)
            return result

        return run


def _close(reference: "weakref.ref[Rolling]") -> None:
    rolling = reference()
    if rolling is not None:
        rolling.close()
