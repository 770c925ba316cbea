"""Exchange what the data-parallel copies of a pipeline have made."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dit_pipelining.comm.packing import pack, tensor_in, unpack


def gather_results(own: Sequence[Any], group: dist.ProcessGroup, device: torch.device) -> list[list[Any]]:
    """The results of every rank of the group, on each of them; tensors that lay on a GPU come to this rank's.

    Args:
        own: what this rank has to give: outputs of pipelines.
        group: over gloo.
        device: of this rank.
    """
    header, flats = pack(list(own))
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, (header, [flat.cpu() for flat in flats]), group=group)
    mine = group.rank()
    return [
        list(own) if rank == mine else _unpacked(header, flats, device) for rank, (header, flats) in enumerate(gathered)
    ]


def _unpacked(header: Any, flats: Sequence[torch.Tensor], device: torch.device) -> list[Any]:
    moved = [
        flat if part.device_type == "cpu" else flat.to(device) for part, flat in zip(header.parts, flats, strict=True)
    ]
    found: list[Any] = unpack(header, tensor_in(moved))
    return found
