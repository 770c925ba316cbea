"""When everything happens: the runtime's schedules, simulated before anything runs.

[Note: what is simulated]
The rules are those of `runtime/turns.py`, `rolling.py`, `worker.py`, and of torch's ScheduleGPipe:
- Requests take turns in a ring. In its turn a request waits for the results of its last step, runs the scheduler, and
  submits the calls of its next step; then the next request has its turn. Sequentially, each call is waited for.
- A call goes to replica (index of the request + calls submitted in this turn) modulo the number of replicas.
- A rank runs its calls in the order of their submission. It posts the receive of call k + 1 when it turns to call k, if k + 1
  has been submitted by then, and otherwise when it turns to k + 1 itself.
- A transfer starts when both sides have posted it and the link is free. A rank waits for its oldest send where more than
  `SENDS_IN_FLIGHT` tensors are on their way.
- The last stage broadcasts a result to all ranks, and each goes on with what depends on it when it is there.
- gpipe: the requests are microbatches of one call. A receive is posted when the rank has finished the microbatch before, and
  a call ends, on all ranks, when all its results have been broadcast.
- Encoding and decoding occupy the rank that owns them, the ranks that have parts, or every rank, after what was submitted
  before, while their request has its turn.
The order of everything is fixed beforehand, so there is no queue of events: each time follows from earlier ones.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dit_pipelining.comm.sends import SENDS_IN_FLIGHT
from dit_pipelining.planning.timeline import ComponentCall, Span, Timeline, Transfer, Workload


def simulate(workload: Workload) -> Timeline:
    """When each rank computes, sends and waits."""
    machine = _Machine(workload)
    if workload.schedule == "gpipe":
        _gpipe(machine)
    else:
        _rolling(machine, alone=workload.schedule == "sequential")
    return machine.timeline()


@dataclass(frozen=True)
class _Call:
    replica: int
    request: int
    step: int
    branch: int


@dataclass
class _Turn:
    """A request that has its turn; `results` says for each call in flight when it arrives on each rank."""

    request: int
    step: int = 0
    ended: bool = False
    results: list[list[float]] = field(default_factory=list)


def _ring(requests: int, at_a_time: int) -> Iterator[_Turn]:
    """Requests in the order of their turns; where one has ended, the next one starts."""
    waiting = deque(_Turn(request) for request in range(requests))
    ring = deque(waiting.popleft() for _ in range(at_a_time))
    while ring:
        turn = ring.popleft()
        yield turn
        if not turn.ended:
            ring.append(turn)
        elif waiting:
            ring.append(waiting.popleft())


def _rolling(machine: "_Machine", alone: bool) -> None:
    load = machine.load
    for turn in _ring(load.requests, load.at_a_time):
        for arrived in turn.results:
            machine.wait(arrived)
        turn.results = []
        machine.between_steps(turn.request, turn.step)
        turn.ended = turn.step == load.steps
        for branch in range(0 if turn.ended else load.calls_per_step):
            replica = (turn.request + (0 if alone else branch)) % load.replicas
            arrived = machine.run(_Call(replica, turn.request, turn.step, branch))
            turn.results.append(arrived)
            if alone:
                machine.wait(arrived)
        turn.step += 1


def _gpipe(machine: "_Machine") -> None:
    load = machine.load
    for step in range(load.steps + 1):
        for request in range(load.requests):
            machine.between_steps(request, step)
        for branch in range(load.calls_per_step if step < load.steps else 0):
            machine.run_batch([_Call(0, request, step, branch) for request in range(load.requests)])


class _Machine:
    """Ranks and links, and until when each is occupied."""

    def __init__(self, load: Workload) -> None:
        self.load = load
        ranks = range(load.num_ranks)
        self.host = [0.0 for _ in ranks]  # the thread that runs the pipeline's code
        self.free = [0.0 for _ in ranks]  # the stage
        self.turned = [0.0 for _ in ranks]  # when the stage turned to its last call
        self.link_free = [0.0 for _ in ranks]  # to the next stage
        self.result_free = [0.0] * load.replicas
        self.sends: list[deque[tuple[float, int]]] = [deque() for _ in ranks]
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []

    # ---- the pipeline's own code --------------------------------------------------------------------------------------

    def wait(self, arrived: Sequence[float]) -> None:
        """Hold the pipeline's code on each rank until a result is there."""
        self.host = [max(time, there) for time, there in zip(self.host, arrived, strict=True)]

    def between_steps(self, request: int, step: int) -> None:
        """What the pipeline does before step `step`: it encodes before the first, and decodes after the last."""
        load = self.load
        if step == 0:
            for call in load.encodes:
                self._component("encode", call, request)
            return
        self.host = [time + load.host_seconds for time in self.host]
        if step == load.steps:
            for call in load.decodes:
                self._component("decode", call, request)

    def _component(self, kind: str, call: ComponentCall, request: int) -> None:
        if not call.seconds:
            return
        ranks = self.load.num_ranks
        together = range(ranks) if call.ranks is None else [rank % ranks for rank in call.ranks]
        ready = [max(self.host[rank], self.free[rank]) for rank in range(ranks)]
        for rank in together:
            start = ready[rank] if call.ranks is None else max(ready[own] for own in together)
            self.spans.append(Span(rank, start, start + call.seconds, kind, request))
            self.free[rank] = start + call.seconds
        if call.ranks is None:
            self.wait(self.free)
        else:  # the others wait for what it made
            self.wait([self.free[together[0]]] * ranks)

    # ---- calls of the transformer -------------------------------------------------------------------------------------

    def run(self, call: _Call) -> list[float]:
        """Submit a call on all ranks, and follow it along the stages; returns when each rank has the result."""
        submitted, made = self.host, 0.0
        for stage in range(self.load.num_stages):
            rank = self._rank(call, stage)
            turned = max(self.free[rank], submitted[rank])
            posted = self.turned[rank] if submitted[rank] <= self.turned[rank] else turned
            ready = self._hop(call, stage, made, posted) if stage else turned
            self.turned[rank] = turned
            made = self._compute(call, stage, max(turned, ready))
        return self._share(call, made, submitted)

    def run_batch(self, calls: Sequence[_Call]) -> None:
        """Run the microbatches of one call, and let all ranks wait for all of it."""
        self.free = [max(free, host) for free, host in zip(self.free, self.host, strict=True)]
        for call in calls:
            made = 0.0
            for stage in range(self.load.num_stages):
                posted = self.free[self._rank(call, stage)]
                made = self._compute(call, stage, self._hop(call, stage, made, posted) if stage else posted)
        for call in calls:
            arrived = self._share(call, made, self.host)
        self.wait([max(arrived)] * self.load.num_ranks)

    def _rank(self, call: _Call, stage: int) -> int:
        return call.replica * self.load.num_stages + stage

    def _compute(self, call: _Call, stage: int, start: float) -> float:
        rank, end = self._rank(call, stage), start + self.load.stage_seconds[stage]
        self.spans.append(Span(rank, start, end, "stage", call.request, call.step, call.branch))
        self.free[rank] = end
        return end

    def _hop(self, call: _Call, stage: int, sent: float, posted: float) -> float:
        """Move what crosses to `stage`; returns when it is there."""
        source, target = self._rank(call, stage - 1), self._rank(call, stage)
        start = max(sent, posted, self.link_free[source])
        end = self.link_free[source] = start + self.load.transfer_seconds[stage - 1]
        self.transfers.append(Transfer(source, target, start, end, "boundary", call.request, call.step, call.branch))
        self._keep(source, end, self.load.boundary_tensors[stage - 1])
        return end

    def _share(self, call: _Call, made: float, posted: Sequence[float]) -> list[float]:
        """Broadcast a result; returns when each rank has it."""
        if self.load.num_ranks == 1:
            return [made]
        root = self._rank(call, self.load.num_stages - 1)
        start = max(made, self.result_free[call.replica])
        end = self.result_free[call.replica] = start + self.load.result_seconds
        self.transfers.append(Transfer(root, -1, start, end, "result", call.request, call.step, call.branch))
        self._keep(root, end, 1)
        return [made if rank == root else max(end, time) for rank, time in enumerate(posted)]

    def _keep(self, rank: int, end: float, tensors: int) -> None:
        """Keep what was sent until it has arrived, and wait for the oldest where that is too much."""
        kept = self.sends[rank]
        kept.append((end, tensors))
        while sum(number for _, number in kept) > SENDS_IN_FLIGHT:
            self.free[rank] = max(self.free[rank], kept.popleft()[0])

    def timeline(self) -> Timeline:
        return Timeline(
            workload=self.load,
            spans=tuple(sorted(self.spans, key=lambda span: (span.rank, span.start))),
            transfers=tuple(self.transfers),
            makespan=max([*self.host, *(span.end for span in self.spans), *(moved.end for moved in self.transfers)]),
        )
