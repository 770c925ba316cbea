"""Run a function on several processes of this machine, as ranks of one group."""

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """Call `function(*args)` on each rank, with one thread and without gradients; returns what it returned, by rank.

    Raises:
        SystemExit: it raised somewhere, or took longer than `timeout` seconds.
    """
    context = multiprocessing.get_context("spawn")
    processes, answers = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            own = (theirs, rank, world_size, f"{folder}/store", timeout, function, args)
            processes.append((context.Process(target=_rank, args=own), ours))
            processes[-1][0].start()
            theirs.close()
        try:
            for rank, (_, connection) in enumerate(processes):
                answers.append(_answer(rank, connection, timeout))
        except SystemExit:
            for process, _ in processes:
                process.kill()
            raise
        for process, _ in processes:
            process.join(60)
    return answers


def in_processes(world_size: int, function: Callable[..., None], *args: Any, seconds: float) -> list[int | None]:
    """Call `function(*args)` in as many processes, each with the environment that torchrun gives a rank.

    Returns:
        their exit codes; None for one that was killed, since it took longer than `seconds`.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = [dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size) for rank in range(world_size)]
    shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    processes = [context.Process(target=_as_rank, args=({**shared, **mine}, function, args)) for mine in own]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _as_rank(variables: dict[str, object], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    function(*args)


def _answer(rank: int, connection: Connection, timeout: float) -> Any:
    try:
        ok, value = connection.recv() if connection.poll(timeout) else (False, f"no answer within {timeout:.0f} s")
    except EOFError:
        ok, value = False, "the process ended"
    if not ok:
        raise SystemExit(f"rank {rank}: {value}")
    return value


def _rank(
    connection: Connection,
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        own = dict(store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **own)
        with torch.no_grad():
            result = function(*args)
        dist.barrier()
        connection.send((True, result))
        dist.destroy_process_group()
    except Exception:
        connection.send((False, traceback.format_exc()))
