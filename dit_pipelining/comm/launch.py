"""Join the process group that torchrun launched this process into."""

import os
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from dit_pipelining.comm.board import Beat, Board, Failure
from dit_pipelining.comm.failure import Guard
from dit_pipelining.config import ParallelConfig
from dit_pipelining.config_checks import integer_in
from dit_pipelining.errors import RemoteRankError, WorldSizeError
from dit_pipelining.torch_internals import default_store

HARDWARE_QUEUES = "32"
"""The most there are. With the default of 8, a stream that waits for another rank can hold up one that need not."""

ANNOUNCEMENT_SECONDS = 5.0
"""How long a rank that fails before it has joined tries to tell the others."""


class Launch:
    """This rank's way into the run, a context: an error inside it ends the run on the other ranks too.

    Before it joins, a rank reads and checks what it can by itself. If that fails, the ranks that have joined are told. From
    then on a `Guard` watches.

    Args:
        config: degrees and time-out.

    Raises:
        WorldSizeError: the launch does not fit the degrees.
        RemoteRankError: on leaving the context, another rank failed first.
    """

    def __init__(self, config: ParallelConfig) -> None:
        config.check_world_size(launched_world_size())
        self.timeout = timedelta(seconds=config.timeout_seconds)
        self._guard: Guard | None = None
        self._made: Guard | None = None
        self._loading = ExitStack()

    @property
    def guard(self) -> Guard:
        assert self._guard is not None  # after `join`
        return self._guard

    def join(self) -> torch.device:
        """Meet the other ranks, make the default process group if there is none, and start the guard.

        Returns:
            this rank's GPU, or the CPU where there are none; on one process that is all.

        Raises:
            RemoteRankError: a rank did not arrive within the time-out, or failed before; names it.
        """
        device = _device()
        rank, world_size = launched_rank(), launched_world_size()
        if world_size == 1:
            return device
        self._guard = Guard.current()
        if self._guard is not None:  # a second pipeline of the same launch: one guard watches over all
            self._loading.enter_context(self._guard.call())
            return device
        store = default_store() if dist.is_initialized() else _launch_store(rank, self.timeout)
        board = Board(store, rank, world_size)
        _arrive(board, self.timeout)
        if not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore("default", store),
                rank=rank,
                world_size=world_size,
                timeout=self.timeout,
            )
        self._guard = self._made = Guard(board, hosts_store=rank == 0 and not _agent_hosts_store())
        self._loading.enter_context(self._guard.call())
        return device

    def __enter__(self) -> "Launch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._guard is None and error is not None and not isinstance(error, RemoteRankError):
            _announce(Failure.raised(launched_rank(), error))
        try:
            self._loading.__exit__(kind, error, traceback)
        except BaseException:
            self._stop()
            raise
        if error is not None:
            self._stop()

    def _stop(self) -> None:
        if self._made is not None:
            self._made.close()


def launched_world_size() -> int:
    """Number of processes of this launch: of the process group, or of torchrun's environment, or 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return integer_in(os.environ, "WORLD_SIZE", 1)


def launched_rank() -> int:
    """This process's number in the launch."""
    return dist.get_rank() if dist.is_initialized() else integer_in(os.environ, "RANK", 0)


def _arrive(board: Board, timeout: timedelta) -> None:
    """Wait until all ranks are here, before any group is made."""
    board.say(Beat())
    deadline = time.monotonic() + timeout.total_seconds()
    while missing := board.missing():
        failure = board.failure()
        if failure is None and time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            failure = board.publish(
                Failure(
                    missing[0],
                    f"rank {names} of {board.world_size} did not arrive within {timeout.total_seconds():g} s "
                    "(ParallelConfig.timeout_seconds): its process has not started, is still loading, or has ended.",
                )
            )
            time.sleep(2 * 0.1)  # this rank may host the store: let the others read the failure
        if failure is not None:
            raise RemoteRankError(str(failure))
        time.sleep(0.1)


def _device() -> torch.device:
    """The GPUs of this machine are dealt out to its ranks in turn; ranks share them where there are fewer."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = integer_in(os.environ, "LOCAL_RANK", 0) % torch.cuda.device_count()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", HARDWARE_QUEUES)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _announce(failure: Failure) -> None:
    """Tell the ranks that have arrived already. Where this rank would host the store, nobody can have."""
    if launched_world_size() == 1 or not (dist.is_initialized() or _agent_hosts_store()):
        return
    with suppress(RuntimeError):  # no store, nobody to tell
        store = (
            default_store()
            if dist.is_initialized()
            else _launch_store(failure.rank, timedelta(seconds=ANNOUNCEMENT_SECONDS))
        )
        Board(store, failure.rank, launched_world_size()).publish(failure)


def _agent_hosts_store() -> bool:
    """Whether torchrun's own process runs the store's server."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _launch_store(rank: int, timeout: timedelta) -> dist.Store:
    """The store that torchrun names, or, without torchrun, that rank 0 hosts at MASTER_ADDR and MASTER_PORT.

    As torch's own `env://` does it, but without waiting for all ranks, since that could not say who is missing.

    Raises:
        WorldSizeError: the environment names no store.
        RemoteRankError: it cannot be reached.
    """
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise WorldSizeError(
            "WORLD_SIZE is set, but MASTER_ADDR and MASTER_PORT are not. Launch with torchrun, or set them, or call "
            "torch.distributed.init_process_group before."
        )
    address, port = os.environ["MASTER_ADDR"], integer_in(os.environ, "MASTER_PORT", 0)
    is_master = rank == 0 and not _agent_hosts_store()
    try:
        store = dist.TCPStore(
            address, port, is_master=is_master, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as error:
        raise RemoteRankError(
            f"rank {rank} found no store at {address}:{port} within {timeout.total_seconds():g} s: rank 0, which hosts it, "
            f"did not arrive, or the port is taken. ({error})"
        ) from None
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
