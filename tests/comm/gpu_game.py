"""GPUs of which the hardware queues are known, and hosts that give them the calls of stages.

What ranks give their GPUs comes from the real `StageStreams` and `PeerLinks`; CUDA's part is played here.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dit_pipelining.comm import peer_channels, peer_links
from dit_pipelining.comm.mesh import Mesh
from dit_pipelining.comm.peer_links import PeerLinks
from dit_pipelining.runtime import streams
from dit_pipelining.runtime.calls import StageCall
from dit_pipelining.runtime.streams import StageStreams

CPU = torch.device("cpu")


class Machine:
    """GPUs with their queues, and their memory: counters by (rank, offset), and what was copied into slots.

    Args:
        ranks: each has a GPU.
        order: which queue is worked off next, where every stream has its own; without it a GPU has one queue.
    """

    def __init__(self, ranks: int, order: Random | None = None) -> None:
        self.queues: list[deque[tuple[str, Callable[[], bool]]]] = [deque() for _ in range(ranks)]
        self.order = order
        self.counters: dict[tuple[int, int], int] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.rank = 0
        self.current: FakeStream | None = None

    def queue_of_stream(self) -> deque[tuple[str, Callable[[], bool]]]:
        """The queue of a new stream of the rank whose program runs."""
        if self.order is None:
            return self.queues[self.rank]
        self.queues.append(deque())
        return self.queues[-1]

    @contextmanager
    def on(self, stream: "FakeStream") -> Iterator[None]:
        """What is given meanwhile goes to this stream."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self) -> "FakeStream":
        if self.current is None:
            self.current = FakeStream(self)
        return self.current

    def give(self, name: str, ready: Callable[[], bool]) -> None:
        """Append an operation to the queue of the current stream; it happens once `ready` returns True."""
        self.current_stream().queue.append((name, ready))

    def work_off(self) -> list[str]:
        """Run all queues; returns what could not be run, because what it waits for never comes."""
        left = [queue for queue in self.queues if queue]
        while left:
            if self.order is not None:
                self.order.shuffle(left)
            ran = next((queue for queue in left if queue[0][1]()), None)
            if ran is None:
                break
            ran.popleft()
            left = [queue for queue in self.queues if queue]
        return [queue[0][0] for queue in left]


class FakeEvent:
    """Happens when the queue has come to where it was recorded."""

    def __init__(self, machine: Machine) -> None:
        self.happened = False
        self.machine = machine

    def record(self, stream: "FakeStream") -> "FakeEvent":
        def happen() -> bool:
            self.happened = True
            return True

        stream.queue.append(("event", happen))
        return self

    def query(self) -> bool:
        return self.happened


class FakeStream:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.queue = machine.queue_of_stream()

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.machine).record(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.append(("wait for event", lambda: event.happened))


class FakeMemory:
    """As PeerMemory, of one rank's view."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def address(self, rank: int, offset: int) -> Any:
        return rank, offset

    def view(self, rank: int, offset: int, shape: Any, dtype: torch.dtype) -> Any:
        return Slot(self.machine, (rank, offset))


class Slot:
    """A tensor in a slot; copying marks it with the number of the call that the copied tensor belongs to."""

    def __init__(self, machine: Machine, place: tuple[int, int]) -> None:
        self.machine = machine
        self.place = place
        self.nbytes = 4

    def copy_(self, tensor: Any, non_blocking: bool) -> None:
        def copy() -> bool:
            self.machine.slots[self.place] = tensor.number
            return True

        self.machine.give("copy", copy)

    def clone(self) -> "Numbered":
        copied = Numbered(self.machine, -1)

        def copy() -> bool:
            copied.number = self.machine.slots[self.place]
            return True

        self.machine.give("copy out of a slot", copy)
        return copied


class Numbered:
    """A tensor of one call."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.number = number
        self.shape, self.dtype, self.nbytes = (1,), torch.float32, 4

    def copy_(self, other: Any) -> None:
        if isinstance(other, Slot):
            self.machine.give(f"take in result {self.number}", lambda: self._expect(other))
        else:
            self.machine.give("copy into a buffer", lambda: self._become(other))

    def _become(self, other: "Numbered") -> bool:
        self.number = other.number
        return True

    def new_empty(self, shape: Any) -> "Numbered":
        return Numbered(self.machine, -1)

    def _expect(self, slot: Slot) -> bool:
        assert self.machine.slots[slot.place] == self.number, "the slot holds another call's result"
        return True


class FakeStage:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def messages(self, graph: Any) -> tuple[tuple[int, ...], ...]:
        return ((4,),)

    def received(self, graph: Any) -> list[Any]:
        return [SimpleNamespace(wire_shape=(1,), dtype=torch.float32)]

    def run(self, number: Any, received: Any, leaves: Any) -> list[Numbered]:
        for tensor in received:

            def check(tensor: Numbered = tensor) -> bool:
                assert tensor.number == number, "the stage got another call's data"
                return True

            self.machine.give(f"stage of call {number}", check)
        return [Numbered(self.machine, number)]


@contextmanager
def played(machine: Machine) -> Iterator[None]:
    """Let streams and links give their work to the machine in place of CUDA."""

    def wait_value(stream: Any, place: Any, value: int) -> None:
        stream.queue.append((f"wait for {place} >= {value}", lambda: machine.counters.get(place, 0) >= value))

    def write_value(stream: Any, place: Any, value: int) -> None:
        def write() -> bool:
            machine.counters[place] = value
            return True

        stream.queue.append(("write", write))

    cuda = SimpleNamespace(
        Event=lambda **_: FakeEvent(machine),
        current_stream=lambda _: machine.current_stream(),
        stream=machine.on,
        synchronize=lambda _: None,
        is_available=lambda: False,
    )
    fake = SimpleNamespace(cuda=cuda, Tensor=torch.Tensor, no_grad=torch.no_grad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_channels, "wait_value", wait_value)
        patch.setattr(peer_channels, "write_value", write_value)
        patch.setattr(peer_channels, "PeerMemory", lambda *_: FakeMemory(machine))
        patch.setattr(peer_links.torch, "cuda", cuda)
        patch.setattr(peer_links.dist, "barrier", lambda **_: None)
        patch.setattr(streams, "torch", fake)
        for name in ("new_stream", "current_context", "enter_context"):
            patch.setattr(peer_channels, name, lambda *_, **__: FakeStream(machine))
        patch.setattr(streams, "new_stream", lambda *_, **__: FakeStream(machine))
        yield


def program(machine: Machine, mesh: Mesh, plan: list[tuple[int, int]], window: int) -> None:
    """What the host of one rank does: submits calls, and waits for the result of each before it submits a later one.

    Args:
        machine: that plays the GPUs.
        mesh: the rank's part.
        plan: for each call the replica it runs on, and how many calls later its result is waited for.
        window: at most so many calls are in flight.
    """
    runner = StageStreams(PeerLinks(mesh, None, CPU), CPU, lambda error: None)  # type: ignore[arg-type]
    waiting: list[tuple[int, StageCall]] = []
    for number, (replica, delay) in enumerate(plan):
        due = [entry for entry in waiting if entry[0] <= number or len(waiting) >= window]
        for entry in due:
            runner.wait(entry[1])
            waiting.remove(entry)
        stage: Any = FakeStage(machine)
        graph: Any = number
        results: list[Any] = [Numbered(machine, number)]
        call = StageCall(stage, graph, {}, replica, results, [])
        runner.submit(call)
        waiting.append((number + delay, call))
    for _, call in waiting:
        runner.wait(call)
    runner.close()
