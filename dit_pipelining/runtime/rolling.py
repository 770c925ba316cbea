"""The rolling schedule: calls in flight on a line of stages, results that are waited for when they are used."""

import atexit
from datetime import timedelta

import torch
import torch.distributed as dist

from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.capture.signature import CallInputs
from dit_pipelining.comm.links import ReplicaLinks, make_links, wake_waiters
from dit_pipelining.comm.mesh import Mesh
from dit_pipelining.lowering.stage import StageModule
from dit_pipelining.runtime.pending import Arrival, PendingTensor, pending
from dit_pipelining.runtime.turns import Turns
from dit_pipelining.runtime.worker import StageCall, StageFailedError, StageWorker, calling_context
from dit_pipelining.torch_internals import version


class Rolling:
    """Runs calls of a pipeline's transformers; shared by all of them.

    Args:
        mesh: which rank plays which part.
        device: of this rank.
        timeout: of the process groups.
    """

    def __init__(self, mesh: Mesh, device: torch.device, timeout: timedelta) -> None:
        self.mesh = mesh
        self.device = device
        self.turns = Turns()
        self.links = make_links(mesh, timeout, device)
        self.worker = StageWorker(device, self._fail)
        atexit.register(self.close)  # a rank that leaves with a send on its way would fail the one that waits for it

    def submit(self, stage: StageModule, graph: BlockGraph, inputs: CallInputs) -> tuple[list[PendingTensor], Arrival]:
        """Start one call; returns at once with the tensors of `graph.output_nodes`, pending.

        All ranks submit the same calls in the same order.
        """
        if self.worker.error is not None:
            raise StageFailedError("a stage failed on this rank; nothing can go on") from self.worker.error
        # What a cache among the inputs holds is on the ranks that filled it.
        links = self.links[self._next_replica() if not inputs.objects else 0]
        results = [
            torch.empty(node.meta["shape"], dtype=node.meta["dtype"], device=self.device) for node in graph.output_nodes
        ]
        is_root = links.root == self.mesh.rank
        works = [] if is_root else links.share(results)
        call = None
        if self.mesh.rank in links.ranks:
            call = self._call(stage, graph, inputs, links, results, is_root)
            self.worker.submit(call)
        arrival = Arrival(lambda: self._wait(call if is_root else None, works))
        return pending(results, arrival), arrival

    def close(self) -> None:
        """Finish what is in flight."""
        self.worker.close()

    def _next_replica(self) -> int:
        """Branches of a step go to different replicas, always the same ones, and so do requests."""
        request = self.turns.current()
        replica = (request.index + request.submitted) % self.mesh.replicas
        request.submitted += 1
        return replica

    def _call(
        self,
        stage: StageModule,
        graph: BlockGraph,
        inputs: CallInputs,
        links: ReplicaLinks,
        results: list[torch.Tensor],
        is_root: bool,
    ) -> StageCall:
        leaves = inputs.leaves
        versions = []
        for path, tensor in inputs.tensors.items():
            if graph.is_new_each_step(path):
                leaves[path] = tensor.clone()  # pipelines write the next step's latents into the same memory
            elif (before := version(tensor)) >= 0:
                versions.append((path, tensor, before))
        return StageCall(stage, graph, leaves, links, results, is_root, versions, calling_context())

    def _wait(self, call: StageCall | None, works: list[dist.Work]) -> None:
        self.turns.end_turn()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise (self.worker.error or error) from None
        if call is not None:
            call.done.wait()
            if call.error is not None:
                raise call.error
            if call.finished is not None:
                torch.cuda.current_stream(self.device).wait_event(call.finished)

    def _fail(self, error: BaseException) -> None:
        self.turns.fail(error)
        wake_waiters(self.links, self.mesh.rank)
