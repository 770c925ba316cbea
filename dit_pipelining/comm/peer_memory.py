"""Memory of every rank's GPU that the GPUs of the other ranks on this host can write into."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dit_pipelining.torch_internals import symmetric_memory


class PeerMemory:
    """One allocation of the same size on every rank; all ranks make it together.

    Args:
        size: bytes on each rank.
        group: of all ranks, over gloo; each has a GPU of its own, all on one host.
        device: this rank's GPU.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.size = size
        memory, self._handle = symmetric_memory(size, group, device)
        memory.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group=group)  # nobody writes before all have zeroed

    def address(self, rank: int, offset: int) -> int:
        """Where byte `offset` of a rank's memory is, for this rank's GPU."""
        return int(self._handle.buffer_ptrs[rank]) + offset

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over a rank's memory from byte `offset` on, which is a multiple of the dtype's size."""
        found: torch.Tensor = self._handle.get_buffer(rank, tuple(shape), dtype, offset // dtype.itemsize)
        return found
