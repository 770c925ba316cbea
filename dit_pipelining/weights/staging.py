"""Tensors from mapped files to a GPU, through pinned memory.

A copy straight out of a mapped file waits for the pages, then for the driver, which brings pieces of pageable memory to the
GPU one after the other. Here threads copy pieces into pinned buffers while the GPU's copy engine empties others.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import torch

READERS = 4
"""Threads of a rank: one reads about 5 GB/s of what the system has in its page cache, and a GPU's link takes 50 GB/s."""

PIECE_BYTES = 16 * 2**20
BUFFERS = 2 * READERS


@dataclass
class Piece:
    """A part of a tensor on its way.

    Attributes:
        filled: done when it is in its buffer.
        buffer: the part of a pinned buffer that it fills.
        target: where it goes on the GPU.
        place: number of the buffer.
        completes: the tensor whose last piece it is, with its name.
    """

    filled: Future[None]
    buffer: torch.Tensor
    target: torch.Tensor
    place: int
    completes: tuple[str, torch.Tensor] | None


def staged(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Move tensors from the host to a device, in order.

    Args:
        tensors: with their names; views of mapped files are read once, piece by piece.
        device: a GPU. (On a CPU, copies are made.)

    Yields:
        each name with a contiguous tensor on the device, valid for work that the current stream is given from then on.
    """
    is_gpu = device.type == "cuda"
    buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(BUFFERS)]
    emptied: list[torch.cuda.Event | None] = [None] * BUFFERS
    places = cycle(range(BUFFERS))
    underway: deque[Piece] = deque()

    def fill(piece: torch.Tensor, buffer: torch.Tensor, place: int) -> None:
        if (event := emptied[place]) is not None:
            event.synchronize()
        buffer.numpy()[:] = piece.numpy()  # by NumPy, which lets other threads run meanwhile and starts none

    def send() -> Iterator[tuple[str, torch.Tensor]]:
        piece = underway.popleft()
        piece.filled.result()
        piece.target.copy_(piece.buffer, non_blocking=is_gpu)
        if is_gpu:
            emptied[piece.place] = torch.cuda.current_stream(device).record_event()
        if piece.completes is not None:
            yield piece.completes

    with ThreadPoolExecutor(READERS, "weights") as readers:
        for name, tensor in tensors:
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            source, into = _bytes(tensor), _bytes(target)
            for start in range(0, max(len(source), 1), PIECE_BYTES):
                if len(underway) == BUFFERS:
                    yield from send()
                place, piece = next(places), source[start : start + PIECE_BYTES]
                buffer = buffers[place][: len(piece)]
                is_last = start + PIECE_BYTES >= len(source)
                underway.append(
                    Piece(
                        readers.submit(fill, piece, buffer, place),
                        buffer,
                        into[start : start + PIECE_BYTES],
                        place,
                        (name, target) if is_last else None,
                    )
                )
        while underway:
            yield from send()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
