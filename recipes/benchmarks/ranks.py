"""Run a function on several processes of this machine, as ranks of one gloo group."""

import multiprocessing
import os
import tempfile
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
