"""A pool of worker processes for the whole test session, and functions run on them as ranks of a process group.

Starting a process costs seconds of imports, so these are done once, in a process that the workers are forked from, and the
workers stay; each job gets a process group of its own. A worker that does not answer in time is killed with all others, and
the next job starts new ones.
"""

import faulthandler
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

GLOO_TIMEOUT = timedelta(seconds=60)
JOB_TIMEOUT_SECONDS = 150.0
STUCK_SECONDS = 120.0


class RanksFailedError(AssertionError):
    """A function raised on some ranks; holds their tracebacks."""


class RankPool:
    """Up to `size` ranks. `run(world_size, function, *args)` calls `function(*args)` on each of them."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a module-level function on ranks 0 to `world_size` - 1 with gloo as the default group.

        Returns:
            what it returned on each rank.

        Raises:
            RanksFailedError: it raised somewhere, or did not end in time.
        """
        assert world_size <= self.size
        self._start(world_size)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                self._workers[rank][1].send((rank, world_size, os.path.join(folder, "store"), function, args))
            answers = [self._answer(rank) for rank in range(world_size)]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            # As in real life: what a failed rank leaves behind (a group with a transfer in flight) ends with its process.
            self.close()
            raise RanksFailedError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join(10)
        self._workers = []

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["diffusers", "transformers", "dit_pipelining.api"])
        while len(self._workers) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _answer(self, rank: int) -> tuple[bool, Any]:
        process, connection = self._workers[rank]
        try:
            if connection.poll(JOB_TIMEOUT_SECONDS):
                answer: tuple[bool, Any] = connection.recv()
                return answer
            text = f"no answer within {JOB_TIMEOUT_SECONDS:.0f} s"
        except (EOFError, ConnectionError):
            process.join(10)
            text = f"the process ended with exit code {process.exitcode}"
        self.close()
        raise RanksFailedError(f"rank {rank}: {text}")


def _serve(connection: Connection) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, store, function, args = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        faulthandler.dump_traceback_later(STUCK_SECONDS)  # where a rank hangs is worth knowing
        try:
            connection.send((True, _run_as_rank(rank, world_size, store, function, args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()


def _run_as_rank(rank: int, world_size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    file_store = dist.FileStore(store, world_size)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world_size, timeout=GLOO_TIMEOUT)
    dist.monitored_barrier(timeout=GLOO_TIMEOUT)  # a rank that is done at once would end what others still connect to
    try:
        with torch.no_grad():
            return function(*args)
    finally:
        gc.collect()  # pipelines are cycles, and their process groups have threads
        dist.destroy_process_group()
