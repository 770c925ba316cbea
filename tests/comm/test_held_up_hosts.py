"""Hosts that their GPU holds up in the middle of a call, played with the others.

A GPU takes some 1,000 operations ahead; then the host waits until one is done, wherever it is. Loading a kernel for the first
time, or memory that runs short, may make it wait until its whole GPU is idle. Neither may end in hosts and GPUs that all wait
for each other, however the streams share the hardware queues.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dit_pipelining.comm.mesh import Mesh
from tests.comm.gpu_game import Machine, played, program

SECONDS = 60.0
"""Within which a game is over."""


class GameOverError(Exception):
    """Nobody can go on: ends the hosts' threads."""


class BoundedMachine(Machine):
    """Hosts and GPUs take turns, one step each, as `order` says.

    Args:
        ranks: each has a host, in a thread of its own, and a GPU.
        order: whose step is next, which streams share a queue, and when a host waits for its whole GPU.
        queues: of each GPU.
        depth: operations that a queue holds.
        idling: the probability that a host waits for its whole GPU before it gives an operation.
    """

    def __init__(self, ranks: int, order: Random, queues: int, depth: int, idling: float) -> None:
        self._own = threading.local()
        super().__init__(0)
        self.gpus: list[list[deque[Any]]] = [[deque() for _ in range(queues)] for _ in range(ranks)]
        self.dice, self.depth, self.idling = order, depth, idling
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._turn = threading.Condition()
        self._next: int | None = None
        self._over = False
        self._ended = 0
        self._errors: list[BaseException] = []

    @property
    def rank(self) -> int:  # type: ignore[override]
        return int(self._own.rank)

    @rank.setter
    def rank(self, rank: int) -> None:
        self._own.rank = rank

    @property
    def current(self) -> Any:  # type: ignore[override]
        return getattr(self._own, "current", None)

    @current.setter
    def current(self, stream: Any) -> None:
        self._own.current = stream

    def queue_of_stream(self) -> Any:
        return BoundedQueue(self, self.rank, self.dice.choice(self.gpus[self.rank]))

    def wait_until(self, rank: int, ready: Callable[[], bool]) -> None:
        """The host of a rank goes on when it is its turn and `ready` holds."""
        with self._turn:
            self._waiting[rank] = ready
            self._next = None
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: self._next == rank or self._over, SECONDS)
            if self._over:
                raise GameOverError
            del self._waiting[rank]

    def play(self, hosts: Sequence[Callable[[], None]]) -> list[str]:
        """Run all hosts and queues to the end; returns what waits for ever."""
        threads = [threading.Thread(target=self._host, args=own, daemon=True) for own in enumerate(hosts)]
        for thread in threads:
            thread.start()
        with self._turn:
            while True:
                everybody = lambda: self._next is None and len(self._waiting) + self._ended == len(hosts)  # noqa: E731
                assert self._turn.wait_for(everybody, SECONDS)
                if not self._step():
                    break
            left = [f"the host of rank {rank}" for rank in sorted(self._waiting)]
            left += [queue[0][0] for queues in self.gpus for queue in queues if queue]
            self._over = True
            self._turn.notify_all()
        for thread in threads:
            thread.join(SECONDS)
        if self._errors:
            raise self._errors[0]
        return left

    def _host(self, rank: int, program: Callable[[], None]) -> None:
        self.rank = rank
        try:
            self.wait_until(rank, lambda: True)
            program()
        except GameOverError:
            pass
        except BaseException as error:
            self._errors.append(error)
        with self._turn:
            self._ended += 1
            self._next = None
            self._turn.notify_all()

    def _step(self) -> bool:
        """One step of one host or queue that can take one; whether there was one."""
        steps: list[Any] = [*sorted(self._waiting), *(queue for queues in self.gpus for queue in queues if queue)]
        self.dice.shuffle(steps)
        for step in steps:
            if isinstance(step, int):
                if self._waiting[step]():
                    self._next = step
                    self._turn.notify_all()
                    return True
            elif step[0][1]():
                step.popleft()
                return True
        return False


class BoundedQueue:
    """A hardware queue as the host that fills it sees it."""

    def __init__(self, machine: BoundedMachine, rank: int, queue: "deque[Any]") -> None:
        self._machine = machine
        self._rank = rank
        self._queue = queue

    def append(self, operation: tuple[str, Callable[[], bool]]) -> None:
        machine = self._machine
        if machine.dice.random() < machine.idling:
            machine.wait_until(self._rank, lambda: not any(machine.gpus[self._rank]))
        machine.wait_until(self._rank, lambda: len(self._queue) < machine.depth)
        self._queue.append(operation)


def left_over(machine: BoundedMachine, stages: int, replicas: int, plans: Sequence[Any], window: int) -> list[str]:
    """Play the program of each rank; returns what waits for ever."""

    def host(rank: int) -> None:
        program(machine, Mesh(rank, stages, replicas), plans[rank], window)

    with played(machine):
        return machine.play([lambda rank=rank: host(rank) for rank in range(stages * replicas)])


@settings(deadline=None, max_examples=60)
@given(
    stages=st.integers(1, 4),
    replicas=st.integers(1, 2),
    plan=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6)), min_size=1, max_size=16),
    window=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    queues=st.integers(1, 8),
    depth=st.integers(1, 8),
    idling=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_hosts_that_wait_for_their_gpu_in_the_middle_of_a_call_do_not_deadlock(
    stages: int,
    replicas: int,
    plan: list[tuple[int, int]],
    window: int,
    seed: int,
    queues: int,
    depth: int,
    idling: float,
) -> None:
    plan = [(replica % replicas, delay) for replica, delay in plan]
    machine = BoundedMachine(stages * replicas, Random(seed), queues, depth, idling)
    assert left_over(machine, stages, replicas, [plan] * (stages * replicas), window) == []


def test_the_game_notices_a_rank_that_submits_in_another_order() -> None:
    machine = BoundedMachine(2, Random(0), queues=2, depth=2, idling=0.0)
    assert left_over(machine, 2, 1, [[(0, 1)] * 3, [(0, 1)] * 2], 2)
