"""End waits for other ranks after a failure, and tell the errors that come of it from causes."""

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from dit_pipelining.errors import RemoteRankError
from dit_pipelining.torch_internals import every_group

SIGNS = ("gloo/transport", "caused pair closure", "NCCL")
"""What the messages of torch's transports hold; the second is that of a transfer over gloo that has timed out."""

UNUSED_TAG = 1 << 20
"""Of a receive that nothing is ever sent to."""


def is_effect(error: BaseException) -> bool:
    """Whether an error says that something happened elsewhere: a lost connection, an aborted or timed-out transfer."""
    if isinstance(error, RemoteRankError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def wake_group_waiters() -> None:
    """Make every wait on this rank's process groups end with an error.

    NCCL groups are aborted. Aborting a gloo group wakes nobody; a wait on it that times out closes its connections.
    """
    for group, backends in every_group():
        if "gloo" in backends and group.size() > 1:
            peer = 1 if group.rank() == 0 else 0
            with suppress(RuntimeError, ValueError, TypeError):  # the time-out; the others if it is destroyed meanwhile
                work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=UNUSED_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
        if "nccl" in backends:
            with suppress(RuntimeError):  # a communicator that is broken already
                group.abort()
