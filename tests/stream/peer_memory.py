"""Peer copies played on the CPU: the memory of every rank is a file that all have mapped, and waits hold up the host.

That is stricter than a GPU, where only a stream would wait: what gets on here, whatever the ranks' speed, gets on there.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dit_pipelining.comm import peer_channels, peer_messages

SECONDS = 60.0


class _Files:
    """As PeerMemory."""

    def __init__(self, folder: Path, size: int, group: Any, *_: Any) -> None:
        number = len(list(folder.glob(f"*-{dist.get_rank()}")))
        self.paths = [folder / f"{number}-{rank}" for rank in range(group.size())]
        self.paths[dist.get_rank()].write_bytes(bytes(size))
        dist.barrier(group=group)
        self.memory = [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in self.paths]

    def address(self, rank: int, offset: int) -> torch.Tensor:
        return self.memory[rank][offset : offset + 4].view(torch.int32)

    def view(self, rank: int, offset: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[rank][offset : offset + size].view(dtype).view(tuple(shape))


class _Stream:
    """A stream whose work is done when it is given, and an event on it."""

    def record_event(self) -> "_Stream":
        return self

    def wait_event(self, event: Any) -> None:
        pass

    def query(self) -> bool:
        return True


@contextmanager
def played(folder: Path) -> Iterator[None]:
    """Let channels use files in a folder in place of GPUs."""

    def wait_value(_: Any, counter: torch.Tensor, value: int) -> None:
        until = time.monotonic() + SECONDS
        while int(counter) < value:
            assert time.monotonic() < until, f"a counter stays at {int(counter)}, {value} are waited for"
            time.sleep(1e-4)

    def write_value(_: Any, counter: torch.Tensor, value: int) -> None:
        counter.fill_(value)

    with ExitStack() as stack:
        for name, value in [
            ("PeerMemory", lambda *given: _Files(folder, *given)),
            ("wait_value", wait_value),
            ("write_value", write_value),
            ("current_context", lambda: None),
        ]:
            stack.enter_context(mock.patch.object(peer_channels, name, value))
        for module in (peer_channels, peer_messages):
            stack.enter_context(mock.patch.object(module, "new_stream", return_value=_Stream()))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", return_value=_Stream()))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", return_value=nullcontext()))
        yield
