"""The order in which ranks give their GPUs work, played on GPUs of which the hardware queues are known.

A real GPU has many hardware queues, and nobody says which streams share one. So both extremes are played here: all streams of
a rank share one queue, in which an operation that has to wait holds up everything behind it; and every stream has a queue of
its own, of which any may be ahead. The program of every rank runs to its end first (no host waits for another), then the
queues are worked off. What hosts do that their GPU holds up is in test_held_up_hosts.py.
"""

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dit_pipelining.comm import peer_channels
from dit_pipelining.comm.mesh import Mesh
from tests.comm.gpu_game import FakeMemory, FakeStream, Machine, played, program

PLANS = (
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=24),
    st.integers(1, 6),
)


def left_over(machine: Machine, stages: int, replicas: int, plan: list[tuple[int, int]], window: int) -> list[str]:
    """Run the program of each rank; returns what its GPU cannot run."""
    plan = [(replica % replicas, delay) for replica, delay in plan]
    with played(machine):
        for rank in range(stages * replicas):
            machine.rank, machine.current = rank, None
            program(machine, Mesh(rank, stages, replicas), plan, window)
        return machine.work_off()


@settings(deadline=None, max_examples=150)
@given(*PLANS)
def test_no_order_of_calls_and_waits_can_deadlock_even_with_one_hardware_queue_per_gpu(
    stages: int, replicas: int, plan: list[tuple[int, int]], window: int
) -> None:
    assert left_over(Machine(stages * replicas), stages, replicas, plan, window) == []


@settings(deadline=None, max_examples=150)
@given(*PLANS, st.randoms(use_true_random=False))
def test_no_stream_that_is_ahead_overwrites_what_another_one_still_reads(
    stages: int, replicas: int, plan: list[tuple[int, int]], window: int, order: Random
) -> None:
    assert left_over(Machine(0, order), stages, replicas, plan, window) == []


def test_the_game_notices_a_rank_that_submits_in_another_order() -> None:
    machine = Machine(2)
    with played(machine):
        for rank, plan in enumerate([[(0, 1)] * 3, [(0, 1)] * 2]):
            machine.rank, machine.current = rank, None
            program(machine, Mesh(rank, 2, 1), plan, 2)
        assert machine.work_off()


def test_a_message_that_does_not_fit_into_its_slot_is_refused() -> None:
    machine = Machine(2)
    memory: Any = FakeMemory(machine)
    channel = peer_channels.Channel(memory, 0, 1, slots=0, capacity=256, arrived=512, taken=576)
    with played(machine):
        stream: Any = FakeStream(machine)
        channel.send([torch.zeros(64)], stream)
        with pytest.raises(ValueError, match="512 bytes does not fit into a slot of 256 bytes"):
            channel.send([torch.zeros(65)], stream)
